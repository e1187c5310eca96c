"""The specification of a request: what its caller wants, checked; and the options that only requests have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_paged.config import ON_WEIGHT_CHANGE
from hf_paged.options.arguments import token_ids
from hf_paged.options.structured import Structured
from hf_paged.options.table import number
from hf_paged.outputs import Completion
from hf_paged.sampling.edit_reference import NEUTRAL, Edits
from hf_paged.sampling.log_probs import LOGPROBS, MOST_TOP, PROCESSED
from hf_paged.sampling.table import Drawing

MOST_PENALTY = 2.0  # as in OpenAI's API
_LONGEST = 1e9

# The options of a request besides a `GenerationConfig`, with the values that change nothing.
PLAIN: dict[str, Any] = {
    "logprobs": False,
    "top_logprobs": None,
    "prompt_logprobs": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop_token_ids": None,
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "timeout": None,
    "on_weight_change": None,
}


@dataclass(frozen=True)
class RequestSpec(Drawing):
    """What one request asks for, checked: the prompt, and the settings for the scheduler, the sampler and the features.

    `request_spec` of `options.settings` makes it from a `GenerationConfig` and the options in `PLAIN`.
    """

    prompt: list[int] = field(default_factory=list)
    max_new_tokens: int = 1
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    edits: Edits = NEUTRAL
    stop_strings: tuple[str, ...] = ()
    max_time: float | None = None  # seconds from the start of the call
    logprobs: str | None = None  # one of `LOGPROBS`
    top_logprobs: int | None = None  # number of likeliest tokens; None makes no dict, not even of the drawn token
    prompt_logprobs: bool = False
    prompt_top_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the request as "stop", and not as "eos"
    include_stop_str_in_output: bool = True  # the text contains the stop string or token
    skip_special_tokens: bool = True
    timeout: float | None = None  # seconds from the queueing of the request
    on_weight_change: str | None = None  # as in `PagedConfig`, whose value counts for None
    cache_salt: bytes = b""  # a digest (`salt_digest`): blocks of the prefix cache are shared under the same one
    adapter_name: str | None = None  # the only LoRA adapter to apply; None for the adapters active in the model
    structured: Structured | None = None  # the form that the output must have
    draft_tokens: int = 0  # the most guesses of a step
    seed: int = 0
    priority: int = 0
    request_id: str | None = None  # None has the engine make an id
    index: int = 0  # of the prompt in its call
    best: int | None = None  # how many of the prompt's completions are returned; None for all
    previous: Completion | None = None  # the checked output of an earlier request that this one continues
    stop: Any = None  # the engine's `StopRule` of the stop strings and `max_time`; None has the engine make it
    grammar: Any = None  # the compiled `Grammar` of `structured`; None if it is not compiled yet
    fed: Any = None  # the `FedPrompt` of a prompt with images
    autocast: torch.dtype | None = None  # to which autocast of the caller casts (`ModelExecutor.autocast_of_call`)

    def but(self, **fields: Any) -> RequestSpec:
        """Return a copy with other values of some fields. `dataclasses.replace` takes 10 times as long."""
        assert fields.keys() <= self.__dict__.keys(), fields
        copied = object.__new__(RequestSpec)
        copied.__dict__.update(self.__dict__, **fields)
        return copied

    def with_options(self, options: Mapping[str, Any], vocab_size: int) -> RequestSpec:
        """Return a copy with these options of `PLAIN`; the others keep the values that change nothing.

        Args:
            vocab_size: number of logits of a token; ids must lie below this number.

        Raises:
            ValueError, TypeError: an option is invalid; the message names it, its value and what is accepted.
        """
        if not changed(options):
            return self
        given = {**PLAIN, **options}
        kind, top = logprobs_asked(given["logprobs"], given["top_logprobs"])
        scores, prompt_top = given["prompt_logprobs"], None
        if scores is not None and not isinstance(scores, bool):
            prompt_top = _count("prompt_logprobs", scores, f"expected True, False, or an integer in [0, {MOST_TOP}]")
        flags = {name: given[name] for name in ("include_stop_str_in_output", "skip_special_tokens")}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected True or False")
        if (on_change := given["on_weight_change"]) is not None and on_change not in ON_WEIGHT_CHANGE:
            raise ValueError(f"on_weight_change={on_change!r:.80}: expected None or one of {ON_WEIGHT_CHANGE}")
        stops = given["stop_token_ids"]
        has_stops = stops is not None and not (isinstance(stops, Sequence) and not len(stops))
        presence, frequency = (number(name, given[name], -MOST_PENALTY, MOST_PENALTY)
                               for name in ("presence_penalty", "frequency_penalty"))
        edits = self.edits
        if presence or frequency:
            edits = replace(edits, presence_penalty=presence, frequency_penalty=frequency)
        return self.but(
            edits=edits, logprobs=kind, top_logprobs=top, prompt_logprobs=prompt_top is not None or bool(scores),
            prompt_top_logprobs=prompt_top,
            stop_token_ids=tuple(token_ids(stops, vocab_size, "stop_token_ids")) if has_stops else (),
            timeout=_timeout(given["timeout"]), on_weight_change=on_change, **flags,
        )

    def scoring_only(self) -> RequestSpec:
        """Return a copy that only scores its prompt; raises ValueError if it has no log-probabilities of the prompt."""
        if not self.prompt_logprobs:
            raise ValueError("max_new_tokens=0: expected at least 1, or prompt_logprobs with it")
        return self.but(max_new_tokens=0)


def take_options(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: keywords.pop(name) for name in PLAIN if name in keywords}


def changed(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that change something."""
    return [name for name, value in options.items() if value is not (plain := PLAIN[name])
            and not (type(value) is type(plain) and value == plain)]


def options_per_prompt(options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the options of each prompt, of a list its value; raises ValueError for a list of another length."""
    lists = {name: value for name, value in options.items() if _is_list_of_values(name, value)}
    for name, values in lists.items():
        if len(values) != count:
            raise ValueError(f"{name}: a list of {len(values)} for {count} prompts; expected one, or one per prompt")
    if not lists:
        return [options] * count
    return [{**options, **{name: values[i] for name, values in lists.items()}} for i in range(count)]


def check_options(options: dict[str, Any], vocab_size: int) -> None:
    """Raise as `RequestSpec.with_options` for an invalid value that applies to all prompts."""
    of_all = {name: value for name, value in options.items() if not _is_list_of_values(name, value)}
    RequestSpec().with_options(of_all, vocab_size)


def _is_list_of_values(name: str, value: Any) -> bool:
    """Return whether a value is a list with one value per prompt; for ``stop_token_ids`` a list of lists (or None)."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "stop_token_ids" or any(isinstance(ids, (list, tuple, type(None))) for ids in value)


def logprobs_asked(logprobs: Any, top_logprobs: Any) -> tuple[str | None, int | None]:
    """Return the kind of `LOGPROBS` or None, and the number of likeliest tokens or None; raises as `with_options`."""
    expected = (f"expected True, False, one of {LOGPROBS}, or the number of the likeliest tokens to bring, an integer "
                f"in [0, {MOST_TOP}]")
    if isinstance(logprobs, int) and not isinstance(logprobs, bool):
        if top_logprobs is not None:
            raise ValueError(f"top_logprobs={top_logprobs!r:.80}: expected None with logprobs={logprobs!r}, a number "
                             "of tokens itself")
        return PROCESSED, _count("logprobs", logprobs, expected)
    if not isinstance(logprobs, (bool, str, type(None))):
        raise TypeError(f"logprobs={logprobs!r:.80}: {expected}")
    if isinstance(logprobs, str) and logprobs not in LOGPROBS:
        raise ValueError(f"logprobs={logprobs!r:.80}: {expected}")
    kind = str.__str__(logprobs) if isinstance(logprobs, str) else PROCESSED if logprobs else None
    if top_logprobs is None:
        return kind, None
    count = _count("top_logprobs", top_logprobs)
    if kind is None:
        raise ValueError(f"top_logprobs={count}: expected logprobs=True or one of {LOGPROBS} with it")
    return kind, count


def _count(name: str, value: Any, expected: str = f"expected an integer in [0, {MOST_TOP}]") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: {expected}")
    if not 0 <= value <= MOST_TOP:
        raise ValueError(f"{name}={value!r:.80}: {expected}")
    return int(value)


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"timeout={value!r:.80}: expected None or a number of seconds above 0")
    if not 0 < value <= _LONGEST:
        raise ValueError(f"timeout={value!r:.80}: expected None or a number of seconds above 0, {_LONGEST:g} at most")
    return float(value)


def check_priority(priority: Any) -> int:
    """An order of requests; TypeError for what is no integer, ValueError for one that 64 bits do not hold."""
    if not isinstance(priority, int):
        raise TypeError(f"priority={priority!r:.80}: expected an integer")
    if not -(2**63) <= priority < 2**63:
        raise ValueError(f"priority={priority!r:.80}: expected an integer in [-2**63, 2**63)")
    return int(priority)
