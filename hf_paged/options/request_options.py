"""The options of a request besides a `GenerationConfig`, and the settings that the engine gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hf_paged.config import ON_WEIGHT_CHANGE
from hf_paged.options.arguments import token_ids
from hf_paged.options.structured import Structured
from hf_paged.sampling.edit_reference import NEUTRAL, Edits
from hf_paged.sampling.table import Drawing
from hf_paged.sampling.token_log_probs import LOGPROBS, PROCESSED
from hf_paged.sampling.top_log_probs import MOST_TOP

MOST_PENALTY = 2.0  # as in OpenAI's API
_LONGEST = 1e9


class RequestOptions(NamedTuple):
    """The options as given by the caller; `settings_with` checks them. The defaults change nothing."""

    logprobs: Any = False
    top_logprobs: Any = None
    prompt_logprobs: Any = False
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = True
    skip_special_tokens: Any = True
    timeout: Any = None
    on_weight_change: Any = None

    @classmethod
    def among(cls, keywords: dict[str, Any]) -> RequestOptions:
        """Take the options out of a call's keywords, and return them."""
        return cls(**{name: keywords.pop(name) for name in cls._fields if name in keywords})

    @property
    def is_plain(self) -> bool:
        """Whether all options have their defaults."""
        return all(map(_is_same, self, PLAIN))

    def asked(self) -> list[str]:
        """Return the names of the options that do not have their defaults."""
        return [name for name, value in self._asdict().items() if not _is_same(value, getattr(PLAIN, name))]

    def per_prompt(self, count: int) -> list[RequestOptions]:
        """Return the options of each prompt; an option that is a list has one value per prompt.

        Raises:
            ValueError: a list has another length; the message names the option.
        """
        lists = {name: value for name, value in self._asdict().items() if _is_list_of_values(name, value)}
        for name, values in lists.items():
            if len(values) != count:
                raise ValueError(f"{name}: a list of {len(values)} for {count} prompts; expected one, or one per "
                                 "prompt")
        if not lists:
            return [self] * count
        return [self._replace(**{name: values[i] for name, values in lists.items()}) for i in range(count)]


PLAIN = RequestOptions()


def _is_same(value: Any, plain: Any) -> bool:
    return value is plain or (type(value) is type(plain) and bool(value == plain))


@dataclass(frozen=True)
class RequestSettings(Drawing):
    """The checked settings of one request for the scheduler, the sampler and the features."""

    max_new_tokens: int
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
    keeps_stop: bool = True  # the text contains the stop string or token
    skips_special: bool = True
    timeout: float | None = None  # seconds from the queueing of the request
    on_weight_change: str | None = None  # as in `PagedConfig`, whose value counts for None
    cache_salt: bytes = b""  # a digest (`salt_digest`): blocks of the prefix cache are shared under the same one
    adapter_name: str | None = None  # the only LoRA adapter to apply; None for the adapters active in the model
    structured: Structured | None = None  # the form that the output must have
    draft_tokens: int = 0  # the most guesses of a step


def check_options(options: RequestOptions, vocab_size: int) -> None:
    """Raise as `settings_with` for an invalid value that applies to all prompts."""
    if options.is_plain:
        return
    own = [name for name, value in options._asdict().items() if _is_list_of_values(name, value)]
    of_all = options._replace(**{name: getattr(PLAIN, name) for name in own})
    settings_with(RequestSettings(max_new_tokens=1), of_all, vocab_size)


def _is_list_of_values(name: str, value: Any) -> bool:
    """Return whether a value is a list with one value per prompt; for ``stop_token_ids`` a list of lists (or None)."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "stop_token_ids" or any(isinstance(ids, (list, tuple, type(None))) for ids in value)


def settings_with(settings: RequestSettings, options: RequestOptions, vocab_size: int) -> RequestSettings:
    """Return the settings of a request with its options.

    Args:
        vocab_size: number of logits of a token; ids must lie below this number.

    Raises:
        ValueError, TypeError: an option is invalid; the message names it, its value and what is accepted.
    """
    if options.is_plain:
        return settings
    kind, top = logprobs_asked(options.logprobs, options.top_logprobs)
    scores, prompt_top = _prompt_logprobs(options.prompt_logprobs)
    check_flags(include_stop_str_in_output=options.include_stop_str_in_output,
                skip_special_tokens=options.skip_special_tokens)
    check_weight_change(options.on_weight_change)
    presence = _penalty("presence_penalty", options.presence_penalty)
    frequency = _penalty("frequency_penalty", options.frequency_penalty)
    if presence or frequency:
        edits = replace(settings.edits, presence_penalty=presence, frequency_penalty=frequency)
        settings = replace(settings, edits=edits)
    return replace(
        settings, logprobs=kind, top_logprobs=top, prompt_logprobs=scores, prompt_top_logprobs=prompt_top,
        stop_token_ids=_stop_token_ids(options.stop_token_ids, vocab_size),
        keeps_stop=options.include_stop_str_in_output, skips_special=options.skip_special_tokens,
        timeout=_timeout(options.timeout), on_weight_change=options.on_weight_change,
    )


def check_flags(**flags: Any) -> None:
    """Raise TypeError for the first flag that is not True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False")


def check_weight_change(on_weight_change: Any) -> None:
    """Raise ValueError for a value that is neither None nor one of `ON_WEIGHT_CHANGE`."""
    if on_weight_change is not None and on_weight_change not in ON_WEIGHT_CHANGE:
        raise ValueError(f"on_weight_change={on_weight_change!r:.80}: expected None or one of {ON_WEIGHT_CHANGE}")


def scoring_only(settings: RequestSettings) -> RequestSettings:
    """Return the settings of a request that only scores its prompt.

    Raises:
        ValueError: the settings have no log-probabilities of the prompt.
    """
    if not settings.prompt_logprobs:
        raise ValueError("max_new_tokens=0: expected at least 1, or prompt_logprobs with it")
    return replace(settings, max_new_tokens=0)


def logprobs_asked(logprobs: Any, top_logprobs: Any) -> tuple[str | None, int | None]:
    """Return the kind of `LOGPROBS` or None, and the number of likeliest tokens or None.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, its value and what is accepted.
    """
    if isinstance(logprobs, int) and not isinstance(logprobs, bool):
        if top_logprobs is not None:
            raise ValueError(f"top_logprobs={top_logprobs!r:.80}: expected None with logprobs={logprobs!r}, a number "
                             "of tokens itself")
        return PROCESSED, _count("logprobs", logprobs, _LOGPROBS_EXPECTED)
    if not isinstance(logprobs, (bool, str, type(None))):
        raise TypeError(f"logprobs={logprobs!r:.80}: {_LOGPROBS_EXPECTED}")
    if isinstance(logprobs, str) and logprobs not in LOGPROBS:
        raise ValueError(f"logprobs={logprobs!r:.80}: {_LOGPROBS_EXPECTED}")
    kind = str.__str__(logprobs) if isinstance(logprobs, str) else PROCESSED if logprobs else None
    if top_logprobs is None:
        return kind, None
    count = _count("top_logprobs", top_logprobs)
    if kind is None:
        raise ValueError(f"top_logprobs={count}: expected logprobs=True or one of {LOGPROBS} with it")
    return kind, count


_LOGPROBS_EXPECTED = (f"expected True, False, one of {LOGPROBS}, or the number of the likeliest tokens to bring, an "
                      f"integer in [0, {MOST_TOP}]")


def _prompt_logprobs(value: Any) -> tuple[bool, int | None]:
    if isinstance(value, int) and not isinstance(value, bool):
        return True, _count("prompt_logprobs", value, _PROMPT_LOGPROBS_EXPECTED)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"prompt_logprobs={value!r:.80}: {_PROMPT_LOGPROBS_EXPECTED}")
    return bool(value), None


_COUNT_EXPECTED = f"expected an integer in [0, {MOST_TOP}]"
_PROMPT_LOGPROBS_EXPECTED = f"expected True, False, or an integer in [0, {MOST_TOP}]"


def _count(name: str, value: Any, expected: str = _COUNT_EXPECTED) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: {expected}")
    if not 0 <= value <= MOST_TOP:
        raise ValueError(f"{name}={value!r:.80}: {expected}")
    return int(value)


def _penalty(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: expected a number in [-2, 2]")
    if not -MOST_PENALTY <= value <= MOST_PENALTY:
        raise ValueError(f"{name}={value!r:.80}: expected a number in [-2, 2]")
    return float(value)


def _stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None or (isinstance(value, Sequence) and not len(value)):
        return ()
    return tuple(token_ids(value, vocab_size, "stop_token_ids"))


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
