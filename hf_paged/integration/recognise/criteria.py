"""Stopping criteria of a call, which stock made or the caller gave: when they end rows."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from transformers.generation import stopping_criteria as criteria

from hf_paged.errors import Reason
from hf_paged.options.settings import token_id_tuple
from hf_paged.options.table import patched_code

NO_LENGTH = Reason("no MaxLengthCriteria bounds the output", remedy="Give `max_new_tokens` or `max_length`.")
GIVE_OPTION = ("Processors and criteria of your own run in lockstep. If an option says the same (`stop_strings`, "
                "`bad_words_ids`, `sequence_bias`), give the option.")
NO_OPTION_SAYS = ("Processors or criteria of transformers were given as objects that no option says: two of a kind, "
                   "in another order than stock's, or with values that no config sets. Give the options, or one object "
                   "of a kind.")


class CallEndedError(Exception):
    """An exception that ends a `generate` whose caller does not wait for it any more."""


class EndOfCall(criteria.StoppingCriteria):
    """A criterion that changes no result and ends the call by an exception, within a step, once an event is set.

    The paged engine checks the event between steps; in lockstep and in stock this is a criterion like any other.
    """

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def check(self) -> None:
        if self._over.is_set():
            raise CallEndedError

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.check()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Stops(NamedTuple):
    """The conditions that end rows: tokens, a length (padded prompt included), stop strings, a `time.time`."""

    eos: tuple[int, ...]
    max_length: int
    strings: criteria.StopStringCriteria | None
    deadline: float | None


def stops_of(given: Any) -> Stops | Reason:
    """Return the conditions under which the criteria end rows, or why the engine cannot carry them out."""
    given = [criterion for criterion in given if type(criterion) is not EndOfCall]
    by_kind: dict[type, list[Any]] = {kind: [] for kind in _CRITERIA}
    for criterion in given:
        if type(criterion) not in by_kind:
            return Reason(f"stopping criterion {type(criterion).__name__} is not carried out by the paged engine",
                          remedy=GIVE_OPTION)
        by_kind[type(criterion)].append(criterion)
    if (reason := patched_code([criteria.StoppingCriteriaList, *map(type, given)])) is not None:
        return reason
    lengths, clocks, strings, eos = (by_kind[kind] for kind in _CRITERIA)
    if len(strings) > 1:
        return Reason("{} StopStringCriteria in one call", len(strings), remedy=NO_OPTION_SAYS)
    if not lengths:
        return NO_LENGTH
    for criterion, value in [*((c, c.max_length) for c in lengths), *((c, c.max_time) for c in clocks),
                             *((c, c.initial_timestamp) for c in clocks)]:
        if not isinstance(value, int if criterion in lengths else (int, float)) or isinstance(value, bool):
            return Reason(f"a {type(criterion).__name__} of the caller's own", remedy=NO_OPTION_SAYS)
    tokens = [token_id_tuple(criterion.eos_token_id) for criterion in eos]
    return Stops(
        tokens[0] if len(tokens) == 1 else tuple(dict.fromkeys(token for ids in tokens for token in ids)),
        min(criterion.max_length for criterion in lengths), strings[0] if strings else None,
        min((clock.initial_timestamp + clock.max_time for clock in clocks), default=None),
    )


_CRITERIA = (criteria.MaxLengthCriteria, criteria.MaxTimeCriteria, criteria.StopStringCriteria,
             criteria.EosTokenCriteria)
