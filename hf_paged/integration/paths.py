"""Which path a call of `generate` takes: told to who asks beforehand (`explain`), counted for who looks afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason
from hf_paged.integration.call_context import within
from hf_paged.outputs import Completion, StepOutput

T = TypeVar("T")
_FOR_ALL_ROWS = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)  # these, or an EOS, end rows


class Answer(BaseException):
    """Ends a call that was only asked about. No Exception, so that nobody on the way takes it for an error."""

    def __init__(self, path: str, *reasons: Reason) -> None:
        super().__init__()
        self.path, self.reasons = path, reasons


@dataclass
class Question:
    """What would a call of this engine's model do? `answer`: None before one came to decode."""

    engine: Engine
    answer: Answer | None = None


_ASKED: ContextVar[Question | None] = ContextVar("hf_paged_asked", default=None)


def asking(question: Question) -> AbstractContextManager[None]:
    """Calls of its engine's model in here end where they would start to decode."""
    return within(_ASKED, question)


def asked() -> Engine | None:
    """The engine of the innermost `asking`."""
    question = _ASKED.get()
    return None if question is None else question.engine


def answer(engine: Engine, path: str, *reasons: Reason) -> None:
    """The call is about to take `path`: raise the `Answer` if this is what somebody asks."""
    if asked() is engine:
        raise Answer(path, *reasons)


@contextmanager
def answered() -> Iterator[None]:
    """Keeps an `Answer` from who called `generate`: PEFT takes its hooks off again only after calls that return."""
    try:
        yield
    except Answer as found:
        question = _ASKED.get()
        assert question is not None
        question.answer = found


@dataclass
class CountedCall:
    """One call that is being counted. `num_tokens`: new tokens that it has handed out."""

    num_tokens: int = 0

    def completions(self, outputs: list[StepOutput]) -> list[Completion]:
        """The completions of last outputs, which the call returns."""
        self.num_tokens = sum(len(output.new_token_ids) for output in outputs)
        return [output.completion for output in outputs if output.completion is not None]


@contextmanager
def counting(engine: Engine, path: str = "native", reason: Reason | None = None) -> Iterator[CountedCall]:
    """Count the block as one call, whether it raises or not, with the tokens that are noted in what it gets."""
    call = CountedCall()
    try:
        yield call
    finally:
        engine.calls.add(path, reason, call.num_tokens)


def counted(engine: Engine, path: str, reason: Reason | None, call: Callable[[], T],
            num_tokens: Callable[[T], int]) -> T:
    """`call()`, counted; where it raises, with no tokens."""
    with counting(engine, path, reason) as one:
        result = call()
        one.num_tokens = num_tokens(result)
        return result


def new_tokens(result: Any, width: int, stopping_criteria: Any, config: GenerationConfig) -> int:
    """Tokens after the first `width` of each row in what stock's decoding returned, padding left out.

    Args:
        result: sequences of shape [..., tokens], or an output with these; 0 for anything else.
        stopping_criteria, config: of the call, as stock prepared them.
    """
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    if not isinstance(sequences, torch.Tensor) or sequences.ndim < 2:
        return 0
    new = sequences.flatten(0, -2)[:, width:].cpu()
    ending = [criterion for criterion in stopping_criteria if hasattr(criterion, "eos_token_id")]
    eos = [torch.as_tensor(criterion.eos_token_id, dtype=torch.int64, device=new.device) for criterion in ending]
    if not eos:  # stock pads no row then
        return new.numel()
    is_eos = torch.isin(new, torch.cat([ids.flatten() for ids in eos]))
    over = is_eos.cumsum(1) > is_eos.int()
    if config._pad_token_tensor is not None and any(type(c) not in _FOR_ALL_ROWS for c in stopping_criteria):
        # A row without EOS that something else ended, a stop string as a rule.
        is_tail = (new == config._pad_token_tensor.cpu()).flip(1).cumprod(1).flip(1).bool()
        over |= is_tail & ~is_eos.any(1, keepdim=True)
    return int((~over).sum())
