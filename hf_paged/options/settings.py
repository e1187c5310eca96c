"""Conversion of a transformers `GenerationConfig` into the settings of a request; its options that are not native."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from hf_paged.errors import Reason, UnsupportedOptionError
from hf_paged.options.arguments import described
from hf_paged.options.logits_options import decay_overflows, edits_from_config
from hf_paged.options.option_values import FLOAT32
from hf_paged.options.patched_options import patched_option
from hf_paged.options.request_options import RequestSettings
from hf_paged.options.table import ARGUMENT, DRAWS, INERT, LOCKSTEP, NATIVE, OPTIONS, names, option_of
from hf_paged.sampling.edit_reference import NEUTRAL, Edits

# For one look-up a field: what never decides, and every neutral value under its own type.
_UNASKED = frozenset(names(NATIVE, INERT))
_UNASKED_IN_LOCKSTEP = _UNASKED | {*names(LOCKSTEP)}
_UNASKED_WITH_A_DICT = _UNASKED | {"return_dict_in_generate"}
_UNASKED_WITHOUT_A_DICT = _UNASKED | {option.name for option in OPTIONS.values() if option.shapes_result}
_NEUTRAL = frozenset((option.name, type(value), value) for option in OPTIONS.values() for value in option.neutral)
_HASHABLE = (bool, int, float, str)


AS_ARGUMENT = "Give it as an argument of `PagedGenerator.generate` or `Engine.add_request`; stock generate ignores it."

LEAVE_OUT = "Leave the option out if its result is not needed."


def unsupported_option(config: GenerationConfig) -> Reason | None:
    """Return the first option of `config` that only stock generate carries out, or None.

    An option that this version of hf_paged has never heard of counts as unsupported unless it is None or False.
    """
    return next(_beyond(config, _UNASKED), None)


def options_beyond_tokens(config: GenerationConfig) -> Iterator[Reason]:
    """Return all options of `unsupported_option` for `model.generate`, which may return the tokens in a dict."""
    with_a_dict = bool(config.return_dict_in_generate)  # as stock asks
    return _beyond(config, _UNASKED_WITH_A_DICT if with_a_dict else _UNASKED_WITHOUT_A_DICT)


def stock_only_options(config: GenerationConfig) -> Iterator[Reason]:
    """Return all options of `unsupported_option` that do not run in lockstep either."""
    return _beyond(config, _UNASKED_IN_LOCKSTEP)


def option_reason(name: str, value: Any) -> Reason:
    """Return the reason that stock has to carry out an option, or an argument of `generate`."""
    if option_of(name).path == ARGUMENT:
        return Reason(f"{name}={{}} of a GenerationConfig is no option of transformers, which ignores it: it is an "
                      "argument of hf_paged's own calls", described(value), remedy=AS_ARGUMENT)
    return Reason(f"{name}={{}} is not carried out by the paged engine", described(value), remedy=LEAVE_OUT)


def _beyond(config: GenerationConfig, carried_out: frozenset[str]) -> Iterator[Reason]:
    for name, value in vars(config).items():
        # None is neutral for every field.
        if value is None or name in carried_out or name.startswith("_"):
            continue
        if type(value) in _HASHABLE and (name, type(value), value) in _NEUTRAL:
            continue
        if not any(_same(value, neutral) for neutral in option_of(name).neutral):
            yield option_reason(name, value)


def settings_from_config(config: GenerationConfig, prompt_length: int, vocab_size: int) -> RequestSettings:
    """Read a fully merged config (user over model over defaults) for a prompt of `prompt_length` tokens.

    Args:
        vocab_size: number of logits of a token: ids in options must lie below it.

    Raises:
        UnsupportedOptionError: an option that is not native, or whose processor or criterion was patched.
        ValueError: a value outside what stock generate accepts or the engine's tables hold, or no room for a new token.
        TypeError: a value of another type than stock takes.
    """
    try:
        settings = _read(config, prompt_length, vocab_size)
    except OverflowError as error:  # an integer that no float holds
        raise ValueError(f"generation settings: {error}, expected numbers that a float holds") from error
    _check_numbers(settings)
    if decay_overflows(settings.edits, settings.max_new_tokens):
        raise ValueError(f"exponential_decay_length_penalty={config.exponential_decay_length_penalty!r:.200}: expected "
                         "a penalty that stays a finite number for all new tokens")
    return settings


def reads_prompt_length(config: GenerationConfig) -> bool:
    """Return whether the settings of a valid merged config depend on the length of the prompt."""
    least = config.min_length
    return config.max_new_tokens is None or (
        config.min_new_tokens is None and least is not None and (type(least) is not int or least > 0)
    )


def _read(config: GenerationConfig, prompt_length: int, vocab_size: int) -> RequestSettings:
    if (option := unsupported_option(config)) is not None:
        raise UnsupportedOptionError(f"{option}; use model.generate for it")
    if (reason := patched_option(config)) is not None:
        raise UnsupportedOptionError(f"{reason}; use model.generate for it")
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "top_k"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}={value!r}: expected None or an integer")
    if not isinstance(config.do_sample, (bool, type(None))):
        raise TypeError(f"do_sample={config.do_sample!r}: expected True or False")
    max_new_tokens = config.max_new_tokens
    if max_new_tokens is None:
        if config.max_length is None:
            raise ValueError("max_new_tokens=None: expected max_new_tokens or max_length to be set")
        max_new_tokens = config.max_length - prompt_length
    if max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens!r}, max_length={config.max_length!r} with a prompt of "
            f"{prompt_length} tokens: expected room for at least one new token"
        )
    min_new_tokens = config.min_new_tokens
    if min_new_tokens is None:  # stock: min_new_tokens takes precedence, whichever is larger
        min_new_tokens = (config.min_length or 0) - prompt_length
    eos = token_id_tuple(config.eos_token_id)
    settings = RequestSettings(
        max_new_tokens=max_new_tokens, min_new_tokens=max(min_new_tokens, 0), eos_token_ids=eos,
        edits=edits_from_config(config, eos, vocab_size), stop_strings=_stop_strings(config.stop_strings),
        max_time=_max_time(config.max_time), draft_tokens=_draft_tokens(config.prompt_lookup_num_tokens),
    )
    return _with_sampling(settings, config) if config.do_sample else settings


def _with_sampling(settings: RequestSettings, config: GenerationConfig) -> RequestSettings:
    drawn: dict[str, Any] = {}
    for option in DRAWS:
        if (value := getattr(config, option.name)) is not None:
            assert option.draws is not None
            drawn[option.name] = option.draws(option.name, value)
    return replace(settings, do_sample=True, **drawn)


# Integers that only the host's Python reads: the length is cut to what there is room for, ids that no token has are
# dropped.
_UNBOUNDED = ("max_new_tokens", "eos_token_ids")
_NAMES_IN_CONFIG = dict.fromkeys(("decay_start", "decay_factor"), "exponential_decay_length_penalty")


def _check_numbers(settings: RequestSettings | Edits) -> None:
    """Raise ValueError for the first field with a number that does not fit into the int32 or float32 of kernels."""
    for name, value in vars(settings).items():
        if type(value) is Edits:
            if value is not NEUTRAL:
                _check_numbers(value)
        elif value and name not in _UNBOUNDED and not _is_encodable(value):
            option = _NAMES_IN_CONFIG.get(name, name)
            raise ValueError(f"{option}={value!r:.200}: expected integers in [-2**31, 2**31), and no NaN")


def _is_encodable(value: Any) -> bool:
    """Return whether a number, or all numbers of a tuple, fit into kernels' dtypes; True for other values."""
    if isinstance(value, float):
        return math.isinf(value) or abs(value) <= FLOAT32.max
    if isinstance(value, int):
        return -(2**31) <= value < 2**31
    return not isinstance(value, tuple) or all(map(_is_encodable, value))


def token_id_tuple(value: Any) -> tuple[int, ...]:
    """Return an EOS setting (None, int, list or tensor) as a tuple of ints."""
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, int) for v in values):
        raise TypeError(f"eos_token_id={value!r}: expected None, an integer or a list of integers")
    return tuple(values)


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is not None and not isinstance(value, (str, Iterable)):
        raise TypeError(f"stop_strings={value!r:.200}: expected None, a string or a list of strings")
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"stop_strings={value!r}: expected None, a string or a list of strings, none of them empty")
    return strings


def _draft_tokens(value: Any) -> int:
    if value is None or value is False:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"prompt_lookup_num_tokens={value!r}: expected None or an integer of at least 1")
    if value < 1:
        raise ValueError(f"prompt_lookup_num_tokens={value!r}: expected None or an integer of at least 1")
    return int(value)


def _max_time(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"max_time={value!r}: expected None or a number of seconds")
    return float(value)


def _same(value: Any, neutral: Any) -> bool:
    """Return whether values are equal, where 0 is not False and 1 is not True."""
    if isinstance(neutral, bool) or isinstance(value, bool) or neutral is None:
        return value is neutral
    return isinstance(value, (int, float, str)) and value == neutral
