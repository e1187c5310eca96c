"""What a caller may ask of one request besides a `GenerationConfig`, by the names of `PagedGenerator.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hf_paged.options.arguments import token_ids
from hf_paged.options.settings import RequestSettings, check_flags, check_weight_change
from hf_paged.sampling.token_log_probs import LOGPROBS, PROCESSED
from hf_paged.sampling.top_log_probs import MOST_TOP

MOST_PENALTY = 2.0  # as in OpenAI's API
_LONGEST = 1e9


class RequestOptions(NamedTuple):
    """As they were given; `settings_with` checks them. The defaults ask for nothing."""

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

    @property
    def is_plain(self) -> bool:
        """Does it ask for nothing?"""
        return all(map(_is_same, self, PLAIN))

    def asked(self) -> list[str]:
        """The names of those that ask for something."""
        return [name for name, value in self._asdict().items() if not _is_same(value, getattr(PLAIN, name))]

    def per_prompt(self, count: int) -> list[RequestOptions]:
        """Those of each prompt: a list holds a value for each.

        Raises:
            ValueError: a list of another length; names the option.
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


def check_options(options: RequestOptions, vocab_size: int) -> None:
    """Raise what `settings_with` raises about a value that is all prompts'."""
    if options.is_plain:
        return
    own = [name for name, value in options._asdict().items() if _is_list_of_values(name, value)]
    of_all = options._replace(**{name: getattr(PLAIN, name) for name in own})
    settings_with(RequestSettings(max_new_tokens=1), of_all, vocab_size)


def _is_list_of_values(name: str, value: Any) -> bool:
    """Token ids are a list themselves, so there a list of lists (or None) holds one for each prompt."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "stop_token_ids" or any(isinstance(ids, (list, tuple, type(None))) for ids in value)


def settings_with(settings: RequestSettings, options: RequestOptions, vocab_size: int) -> RequestSettings:
    """The settings of a request with its options.

    Args:
        vocab_size: number of logits of a token: ids lie below it.

    Raises:
        ValueError, TypeError: naming the option, its value and what is accepted.
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


def scoring_only(settings: RequestSettings) -> RequestSettings:
    """The settings of a request that gets no token.

    Raises:
        ValueError: it does not ask for its prompt's log-probabilities either.
    """
    if not settings.prompt_logprobs:
        raise ValueError("max_new_tokens=0: expected at least 1, or prompt_logprobs with it")
    return replace(settings, max_new_tokens=0)


def logprobs_asked(logprobs: Any, top_logprobs: Any) -> tuple[str | None, int | None]:
    """Which of `LOGPROBS` a caller asks for, or None, and how many of the likeliest tokens, or None.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is accepted.
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
