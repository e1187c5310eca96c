"""Guesses of the next tokens of a request (speculative decoding): continuations of equal text in its prompt, in its
output, or in outputs of other requests of the same prompt.

A guess changes no token of the output (the step that computes it confirms it), only speed. Prompt lookup is due to
Saxena 2023 (prompt-lookup-decoding), lookup in other rollouts to SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from hf_paged.engine.features import StepFeature
from hf_paged.engine.features.token_index import NGRAM, Match, TokenIndex
from hf_paged.engine.session import Request
from hf_paged.scheduler import Status
from hf_paged.scheduler.plan import MOST_GUESSING_ROWS, NO_DRAFTS, Drafts

# Guesses of a request in one step: with its known token they are a step of 8 rows, for which there is a graph.
MOST_DRAFTS = 7
# A request begins to guess when the running mean of right guesses per run reaches _GAIN_ON, and stops below _GAIN_OFF.
_GAIN_OFF, _GAIN_ON = 0.5, 1.0
_OF_LAST_RUN = 0.25
# After so many tokens in common with another text, one token that differs counts as replaced, and the match goes on.
_COPIED = 8
# Last tokens of the prompt that a request's own text begins with.
_TAIL = 16
# Tokens that are kept: of one prompt with its outputs (a long prompt alone may have more), and of all prompts.
MOST_OF_PROMPT, MOST_REMEMBERED, MOST_PROMPTS = 1 << 16, 1 << 18, 1024


class StepCosts(NamedTuple):
    """The cost of guesses, in units of the fixed time of a step (the part that does not depend on its rows).

    Attributes:
        row: cost of one more row.
        waiting: cost of planning a step after the one before it is done, and not while it runs.
    """

    row: float
    waiting: float


# cuda: a 0.6B model on an H200, where a step of 8 rows took 1.25 ms, and one with guesses 2.3 ms, of which the host's
# part is the same for larger models. cpu: small models; steps on a CPU never overlap, so that waiting costs nothing.
COSTS = {"cuda": StepCosts(1 / 64, 1.0), "cpu": StepCosts(1 / 8, 0.0)}


class Drafter:
    """Guesses for one request.

    Whether the drafter guesses depends on how many guesses would have been right so far, made or not: each time that
    the end of the text occurred before, a run of guesses begins, which ends with the first wrong guess.

    Args:
        index: index of the request's prompt and of other outputs of it; the request's own text is added to it.
        known: the last tokens of the prompt, and the output so far.
        num_output: number of output tokens in ``known``.
        most: the most guesses of a step.

    Attributes:
        num_seen: number of output tokens that were pushed.
        gain: running mean of the right guesses of a run.
    """

    def __init__(self, index: TokenIndex, known: list[int], num_output: int, most: int) -> None:
        self._index, self._most = index, most
        self._text = index.add(known)
        self.num_seen = num_output
        self.gain = _GAIN_ON
        self._is_on = True
        self._match: Match | None = index.look_up(self._text)
        self._in_run = self._num_right = 0  # guesses of the present run that were checked, and that were right

    def push(self, tokens: list[int]) -> None:
        """Append the request's next tokens, and check the guesses of the present run against them."""
        index, text, done = self._index, self._text, 0
        while done < len(tokens):
            match = self._match
            if match is None:
                index.extend(text, tokens[done : done + 1])
                done += 1
                self._match = index.look_up(text)
                continue
            expected = index.continuation(text, match, min(len(tokens) - done, self._most - self._in_run) + 1)
            given = tokens[done : done + len(expected[: self._most - self._in_run])]
            count = 0
            while count < len(given) and expected[count] == given[count]:
                count += 1
            is_right = count == len(given)
            given = given[: count + 1]
            done += len(given)
            index.extend(text, given)
            self._in_run += len(given)
            self._num_right += count
            following = None
            if len(expected) > len(given):  # else that text ends here
                common = match.common + count if is_right else 0
                following = Match(match.text, match.position + len(given), common)
            if is_right:
                self._match = following or index.look_up(text)
            else:
                was_copied = match.common + count >= _COPIED
                self._match = index.look_up(text) or (following if was_copied else None)
            if not is_right or self._in_run == self._most or self._match is None:
                self.gain += (self._num_right - self.gain) * _OF_LAST_RUN
                self._is_on = self.gain >= (_GAIN_OFF if self._is_on else _GAIN_ON)
                self._in_run = self._num_right = 0
        self.num_seen += len(tokens)

    def guesses(self, most: int, least_chance: float) -> list[int]:
        """Return at most ``most`` guesses, each with a chance of at least ``least_chance`` to be right."""
        if self._match is None or not self._is_on:
            return []
        likely = int(math.log(least_chance) / math.log(self.chance))
        return self._index.continuation(self._text, self._match, min(most, self._most, likely))

    @property
    def chance(self) -> float:
        """The chance of a guess to be right if the guesses before it are: that of geometric runs of mean `gain`."""
        return self.gain / (1.0 + self.gain)


class Rollouts:
    """Indexes of the most recently used prompts, each with the outputs of its requests."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[bytes, TokenIndex] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all indexes."""
        return sum(index.num_tokens for index in self._indexes.values())

    def index_of(self, prompt: list[int], salt: bytes) -> TokenIndex:
        """Return the index of a prompt for requests of one cache salt; drops the least recently used ones."""
        key = blake2b(np.array(prompt, np.int64).tobytes(), digest_size=16).digest() + salt
        index = self._indexes.pop(key, None)
        if index is None:
            index = TokenIndex()
            index.add(prompt)
        elif index.num_tokens > max(MOST_OF_PROMPT, len(prompt) + MOST_OF_PROMPT // 2):
            index = _latest_half(index)
        self._indexes[key] = index
        while len(self._indexes) > MOST_PROMPTS or (len(self._indexes) > 1 and self.num_tokens > MOST_REMEMBERED):
            self._indexes.popitem(last=False)
        return index

    def forget(self) -> None:
        """Drop all indexes."""
        self._indexes.clear()


def _latest_half(index: TokenIndex) -> TokenIndex:
    """Return a new index of the prompt and the latest other texts, up to half of `MOST_OF_PROMPT` tokens."""
    prompt, *others = index.texts
    room, kept = MOST_OF_PROMPT // 2, 0
    for text in reversed(others):
        room -= len(text)
        if room < 0:
            break
        kept += 1
    made = TokenIndex()
    for text in (prompt, *others[len(others) - kept :]):
        made.add(text)
    return made


class Speculation(StepFeature):
    """The guesses of one engine's requests.

    Args:
        is_on: requests may guess.
    """

    def __init__(self, is_on: bool = True) -> None:
        super().__init__()
        self._is_on = is_on
        self._running: dict[str, Request] = {}  # requests that got a slot, so that a step visits no waiting ones
        self._drafters: dict[str, Drafter] = {}  # of requests that ran, by request id
        self._rollouts = Rollouts()

    def uses(self, request: Request) -> bool:
        # No guesses under a grammar, whose masks are made for one next token a step.
        spec = request.spec
        return bool(self._is_on and spec.draft_tokens and request.grammar is None and spec.structured is None)

    def admit(self, request: Request) -> None:
        request.draft_tokens = request.spec.draft_tokens

    def started(self, request: Request) -> None:
        self._running[request.request_id] = request

    def leave(self, request: Request) -> None:
        self._running.pop(request.request_id, None)
        self._drafters.pop(request.request_id, None)  # the output stays in the index of its prompt

    def lose_steps(self) -> None:
        # An interrupt may have come while a text was added to an index, which later look-ups would fail on.
        self._drafters.clear()
        self._rollouts.forget()

    def forget(self) -> None:
        self._rollouts.forget()

    def drafts(self, num_running: int, device_type: str) -> Drafts:
        """Return guesses by slot if the expected gain is above their cost. ``num_running``: running requests."""
        costs = COSTS.get(device_type, COSTS["cuda"])
        most = min(MOST_DRAFTS, MOST_GUESSING_ROWS // max(1, num_running) - 1)
        if most < 1 or not self._running:
            return NO_DRAFTS
        rate = num_running / (1.0 + costs.row * num_running)  # tokens per fixed time of a step, without guesses
        found: dict[int, list[int]] = {}
        gain, lost = 0.0, rate * costs.waiting
        for request in list(self._running.values()):
            guesses = self.attempt(request, self._guesses, request, most, rate * costs.row)
            if guesses:
                found[request.sequence.slot] = guesses
                lost += rate * costs.row * len(guesses)
                chance = self._drafters[request.request_id].chance
                gain += sum([chance ** (i + 1) for i in range(len(guesses))])
        return found if gain > lost else NO_DRAFTS

    def _guesses(self, request: Request, most: int, least_chance: float) -> list[int]:
        """Return the guesses of one request; none if the request has no new token to guess behind."""
        sequence = request.sequence
        if sequence.status is not Status.RUNNING:
            return []
        drafter = self._drafters.get(request.request_id)
        if drafter is None:
            prompt, output = sequence.prompt_token_ids, sequence.output_token_ids
            index, tail = self._rollouts.index_of(prompt, sequence.cache_salt), prompt[-max(_TAIL, NGRAM) :]
            drafter = Drafter(index, tail + output, len(output), request.draft_tokens)
            self._drafters[request.request_id] = drafter
        drafter.push(sequence.output_from(drafter.num_seen))
        if not 0 < drafter.num_seen == sequence.num_output_tokens:
            return []  # the prompt is being computed, or the request started over and regenerates its output
        return drafter.guesses(most, least_chance)
