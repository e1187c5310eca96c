"""Verdict on a clone, from its numbers: the checks in their order, and what they leave open."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.proof.checks.conditions import one_way_conditions, unseen_code
from hf_paged.models.proof.checks.far import Reach, check_far, length_readers
from hf_paged.models.proof.checks.prepared import count_preparing
from hf_paged.models.proof.checks.prompts import check_prompts, generated_by_stock
from hf_paged.models.proof.checks.rows import STEP_TOKENS, check_crowd, check_other_rows
from hf_paged.models.proof.checks.states import check_batch, check_chunks, takes_chunks
from hf_paged.models.proof.checks.token_operations import token_operations
from hf_paged.models.proof.clone import Double, clone_of
from hf_paged.models.proof.lengths import config_lengths, module_lengths
from hf_paged.models.proof.line_counts import LineCounts, modeling_files
from hf_paged.models.proof.outline import farthest
from hf_paged.models.proof.stock import forward
from hf_paged.models.proof.subject import TOLERANCE, Subject, distance, subject_of
from hf_paged.models.proof.verdict import Refused, Verdict


def numbers_of(cls: type[PreTrainedModel], small: PreTrainedConfig, attention: str) -> Verdict:
    """Compare a clone of a reduced config with stock; may raise `Refused`."""
    with Double():
        model = clone_of(cls, small, attention)
        subject = subject_of(model, attention, farthest(small))
        before = _plain_state(model)
        subject.whole_prompts = bool(subject.states) and not takes_chunks(subject)
        lines = LineCounts(modeling_files(model.modules()))
        with lines.counting():
            made = generated_by_stock(subject)
            check_prompts(subject, made)
        check_other_rows(subject)
        lengths = sorted(config_lengths(small) | lines.lengths() | module_lengths(model))
        with lines.counting():
            reach = check_far(subject, lengths)
            if subject.states:
                check_chunks(subject, lengths)
        max_length = count_preparing(subject, lengths, reach.max_length, lines)
        max_step_tokens = _many_tokens(subject, reach, lengths)
        _check_state(subject, before, reach)
        reasons = [*one_way_conditions(lines), *unseen_code(lines, model), *token_operations(subject)]
        if not reach.differs:
            reasons += [f"the cache's length changes logits in {place}" for place in length_readers(subject)]
    return Verdict("open" if reasons else "proved", "; ".join(reasons), max_length, max_step_tokens,
                   whole_prompts=subject.whole_prompts)


def _many_tokens(subject: Subject, reach: Reach, lengths: list[int]) -> int:
    """Return the tokens of a step up to which logits were found not to depend on their number; may raise `Refused`."""
    if subject.states:  # prompts run one by one, as in stock
        check_batch(subject)
        return STEP_TOKENS
    most = _step_limit(subject, reach)
    for length in lengths:
        if length < most:  # code may ask whether a step has just so many tokens
            check_crowd(subject, length)
    return most


def _step_limit(subject: Subject, reach: Reach) -> int:
    """Return the tokens of a step at which logits were found to agree; may raise `Refused`."""
    try:
        return check_crowd(subject)
    except Refused:
        if not reach.differs or reach.max_length is None:
            raise
        # A module that counts a step's tokens as a length: below its threshold, all is well.
        return check_crowd(subject, reach.max_length)


def _check_state(subject: Subject, before: dict[str, Any], reach: Reach) -> None:
    """Raise `Refused` if the forwards of the checks changed the model; not for a model that is proved to a length."""
    if reach.differs:
        return
    again = distance(forward(subject.model, subject.prompts[3]), subject.alone[3])
    if again >= TOLERANCE:
        raise Refused("stock's forward of the same tokens gives other logits after other forwards: they differ by "
                      f"{again:.1e} of their standard deviation")
    now = _plain_state(subject.model)
    if changed := sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name)):
        raise Refused(f"forwards change what modules hold: {', '.join(changed[:3])}")


def _plain_state(model: PreTrainedModel) -> dict[str, Any]:
    """Return the plain values that modules hold, and a sum of each buffer."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        state |= {f"{path}.{name}": value for name, value in vars(module).items()
                  if type(value) in (int, float, bool, str)}
        state |= {f"{path}.{name}": float(torch.sum(buffer.double())) for name, buffer in module._buffers.items()
                  if buffer is not None}
    return state
