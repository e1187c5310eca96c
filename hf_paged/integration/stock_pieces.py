"""Are the processors and criteria that reach `_sample` exactly those that stock makes of the generation config?"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.options.patched_options import patched_code
from hf_paged.options.settings import token_id_tuple


class CallEndedError(Exception):
    """The caller of this `generate` does not wait for it any more."""


class EndOfCall(criteria.StoppingCriteria):
    """A criterion that changes no result and ends the call by an exception, within a step, once an event is set.

    The paged engine knows it, and looks at it between steps; in lockstep and in stock it is called as any other.
    """

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def check(self) -> None:
        """Raise CallEndedError once the event is set."""
        if self._over.is_set():
            raise CallEndedError

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.check()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Stops(NamedTuple):
    """What ends rows besides EOS and their length."""

    strings: criteria.StopStringCriteria | None
    deadline: float | None  # of time.time()


def processor_reason(model: Any, config: GenerationConfig, given: Any, input_ids: torch.Tensor,
                     model_kwargs: dict[str, Any]) -> str | None:
    """Why `given` is not what stock makes of `config`, whose options are all native; None where it is."""
    expected = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=input_ids.shape[1], logits_processor=LogitsProcessorList(),
        device=input_ids.device, model_kwargs=model_kwargs,
    )
    for processor in given:
        if type(processor).__module__ != processors.__name__:
            return f"logits processor {type(processor).__name__} is not carried out by the paged engine"
    if (reason := patched_code([type(given), *map(type, given)])) is not None:
        return reason
    if [type(p) for p in given] != [type(p) for p in expected]:
        found = ", ".join(type(p).__name__ for p in given) or "none"
        return f"the logits processors ({found}) are not those that stock makes of the generation config"
    for processor, made in zip(given, expected, strict=True):
        attributes = vars(processor)
        # No config sets the first two: the code where stock makes the processor was patched.
        own = attributes.get("filter_value", -torch.inf) != -torch.inf or attributes.get("min_tokens_to_keep", 1) != 1
        if own or not _same(attributes, vars(made)):
            return f"a {type(processor).__name__} of the caller's own"
    return None


def criteria_reason(config: GenerationConfig, given: Any) -> Stops | str:
    """What the criteria watch for, or why `given` is not what stock makes of `config`."""
    given = [criterion for criterion in given if type(criterion) is not EndOfCall]
    kinds = [type(criterion) for criterion in given]
    expected = {
        criteria.MaxLengthCriteria: True,
        criteria.MaxTimeCriteria: config.max_time is not None,
        criteria.StopStringCriteria: config.stop_strings is not None,
        criteria.EosTokenCriteria: bool(token_id_tuple(config.eos_token_id)),
    }
    for kind in kinds:
        if kind not in expected:
            return f"stopping criterion {kind.__name__} is not carried out by the paged engine"
    if (reason := patched_code([type(given), *kinds])) is not None:
        return reason
    for kind, is_expected in expected.items():
        if kinds.count(kind) != is_expected:
            return f"{kinds.count(kind)} {kind.__name__}, which stock does not make of the generation config"
    by_kind = {type(criterion): criterion for criterion in given}
    eos, strings = by_kind.get(criteria.EosTokenCriteria), by_kind.get(criteria.StopStringCriteria)
    clock = by_kind.get(criteria.MaxTimeCriteria)
    if eos is not None and set(token_id_tuple(eos.eos_token_id)) != set(token_id_tuple(config.eos_token_id)):
        return "an EosTokenCriteria of the caller's own"
    if strings is not None:
        wanted = (config.stop_strings,) if isinstance(config.stop_strings, str) else tuple(config.stop_strings)
        if strings.stop_strings != wanted:
            return "a StopStringCriteria of the caller's own"
    if clock is not None and clock.max_time != config.max_time:
        return "a MaxTimeCriteria of the caller's own"
    return Stops(strings, None if clock is None else clock.initial_timestamp + clock.max_time)


def _same(a: Any, b: Any) -> bool:
    """Equality of what processors keep: numbers, tensors, and lists or dicts of them."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.to(b.device), b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b
