"""Context of a `generate` call (seed, salt, question of `explain`), and its path, which is counted after decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason
from hf_paged.outputs import Completion, StepOutput

T = TypeVar("T")
# The seed of calls, in place of the config's or of one drawn from torch's generator.
CALL_SEED: ContextVar[int | None] = ContextVar("hf_paged_call_seed", default=None)
# Calls share cached prefixes only with calls of the same digest (see `salt_digest`).
CALL_SALT: ContextVar[bytes] = ContextVar("hf_paged_call_salt", default=b"")


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set `variable` to `value` within the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_FOR_ALL_ROWS = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)  # the only other end of a row is an EOS


class Answer(BaseException):
    """Ends a call of `explain`. A BaseException, so that no `except Exception` in between catches it."""

    def __init__(self, path: str, *reasons: Reason) -> None:
        super().__init__()
        self.path, self.reasons = path, reasons


@dataclass
class Question:
    """Query of `explain` for the path of a call of this engine's model; `answer` is None before decoding starts."""

    engine: Engine
    answer: Answer | None = None


# Calls of the question's model end where they would start to decode.
ASKED: ContextVar[Question | None] = ContextVar("hf_paged_asked", default=None)


def asked() -> Engine | None:
    """Return the engine of the question that this context asks, or None."""
    question = ASKED.get()
    return None if question is None else question.engine


def answer(engine: Engine, path: str, *reasons: Reason) -> None:
    """Report that a call is about to take `path`: raises `Answer` in a call of `explain`."""
    if asked() is engine:
        raise Answer(path, *reasons)


@contextmanager
def answered() -> Iterator[None]:
    """Store an `Answer` in its question and do not raise it: PEFT removes its hooks only after calls that return."""
    try:
        yield
    except Answer as found:
        question = ASKED.get()
        assert question is not None
        question.answer = found


@dataclass
class CountedCall:
    """Counter of one call. `num_tokens`: new tokens that it returned."""

    num_tokens: int = 0

    def completions(self, outputs: list[StepOutput]) -> list[Completion]:
        """Return the completions of last outputs and count their tokens."""
        self.num_tokens = sum(len(output.new_token_ids) for output in outputs)
        return [output.completion for output in outputs if output.completion is not None]


@contextmanager
def counting(engine: Engine, path: str = "native", reason: Reason | None = None) -> Iterator[CountedCall]:
    """Count the block as one call, even if it raises, with the tokens stored in the yielded counter."""
    call = CountedCall()
    try:
        yield call
    finally:
        engine.calls.add(path, reason, call.num_tokens)


def counted(engine: Engine, path: str, reason: Reason | None, call: Callable[[], T],
            num_tokens: Callable[[T], int]) -> T:
    """Return `call()` and count it, without tokens if it raises."""
    with counting(engine, path, reason) as one:
        result = call()
        one.num_tokens = num_tokens(result)
    return result


def new_tokens(result: Any, width: int, stopping_criteria: Any, config: GenerationConfig) -> int:
    """Return the number of tokens after the first `width` of each row of stock's result, without padding.

    Args:
        result: Sequences of shape [..., tokens], or an output with these; 0 for anything else.
        stopping_criteria, config: Arguments of the decoding method, as prepared by stock.
    """
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    if not isinstance(sequences, torch.Tensor) or sequences.ndim < 2:
        return 0
    new = sequences.flatten(0, -2)[:, width:].cpu()
    ending = [criterion for criterion in stopping_criteria if hasattr(criterion, "eos_token_id")]
    eos = [torch.as_tensor(criterion.eos_token_id, dtype=torch.int64, device=new.device) for criterion in ending]
    if not eos:  # then stock pads no row
        return new.numel()
    is_eos = torch.isin(new, torch.cat([ids.flatten() for ids in eos]))
    over = is_eos.cumsum(1) > is_eos.int()
    if config._pad_token_tensor is not None and any(type(c) not in _FOR_ALL_ROWS for c in stopping_criteria):
        # For rows without EOS that another criterion ended, usually a stop string.
        is_tail = (new == config._pad_token_tensor.cpu()).flip(1).cumprod(1).flip(1).bool()
        over |= is_tail & ~is_eos.any(1, keepdim=True)
    return int((~over).sum())
