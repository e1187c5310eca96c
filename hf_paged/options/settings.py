"""Conversion of a transformers `GenerationConfig` into a `RequestSpec`; its options that are not native."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig

from hf_paged.errors import Reason, UnsupportedOptionError
from hf_paged.options.arguments import described
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.table import (
    ALWAYS,
    ARGUMENT,
    DRAWS,
    EDITS,
    FLOAT32,
    INERT,
    LOCKSTEP,
    NATIVE,
    OPTIONS,
    Context,
    classes,
    names,
    number,
    option_of,
    patched_code,
)
from hf_paged.sampling.edit_reference import NEUTRAL, Edits

# For one look-up a field: what never decides, and every neutral value under its own type.
_UNASKED = frozenset(names(NATIVE, INERT))
_UNASKED_IN_LOCKSTEP = _UNASKED | {*names(LOCKSTEP)}
_UNASKED_WITH_A_DICT = _UNASKED | {"return_dict_in_generate"}
_UNASKED_WITHOUT_A_DICT = _UNASKED | {option.name for option in OPTIONS.values() if option.shapes_result}
_NEUTRAL = frozenset((option.name, type(value), value) for option in OPTIONS.values() for value in option.neutral)
_HASHABLE = (bool, int, float, str)
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
                      "argument of hf_paged's own calls", described(value),
                      remedy="Give it as an argument of `PagedGenerator.generate` or `Engine.add_request`; stock "
                             "generate ignores it.")
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


def request_spec(config: GenerationConfig, prompt_length: int, vocab_size: int,
                 options: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> RequestSpec:
    """Return the specification of a request. All requests are made here, or copied from one that was.

    Args:
        config: fully merged (user over model over defaults).
        prompt_length: the number of tokens of the prompt.
        vocab_size: number of logits of a token: ids in options must lie below it.
        options: those in `PLAIN` that the caller gave.
        fields: checked values of further fields.

    Raises:
        UnsupportedOptionError: an option that is not native, or whose processor or criterion was patched.
        ValueError: a value outside what stock generate accepts or the engine's tables hold, or no room for a new token.
        TypeError: a value of another type than stock takes.
    """
    try:
        spec = _read(config, prompt_length, vocab_size)
    except OverflowError as error:  # an integer that no float holds
        raise ValueError(f"generation settings: {error}, expected numbers that a float holds") from error
    _check_numbers(spec)
    if spec.edits.decay_start is not None and _decay_overflows(spec.edits, spec.max_new_tokens):
        raise ValueError(f"exponential_decay_length_penalty={config.exponential_decay_length_penalty!r:.200}: expected "
                         "a penalty that stays a finite number for all new tokens")
    spec = spec.with_options(options, vocab_size)
    return spec.but(**fields) if fields else spec


def reads_prompt_length(config: GenerationConfig) -> bool:
    """Return whether the settings of a valid merged config depend on the length of the prompt."""
    least = config.min_length
    return config.max_new_tokens is None or (
        config.min_new_tokens is None and least is not None and (type(least) is not int or least > 0)
    )


def _read(config: GenerationConfig, prompt_length: int, vocab_size: int) -> RequestSpec:
    if (option := unsupported_option(config)) is not None:
        raise UnsupportedOptionError(f"{option}; use model.generate for it")
    if (reason := patched_code([*ALWAYS, *classes(config)])) is not None:
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
    drawn: dict[str, Any] = {"do_sample": bool(config.do_sample)}
    for drawing in DRAWS if config.do_sample else ():
        if (value := getattr(config, drawing.name)) is not None:
            assert drawing.draws is not None
            drawn[drawing.name] = drawing.draws(drawing.name, value)
    return RequestSpec(
        max_new_tokens=max_new_tokens, min_new_tokens=max(min_new_tokens, 0), eos_token_ids=eos,
        edits=edits_from_config(config, eos, vocab_size), stop_strings=_stop_strings(config.stop_strings),
        max_time=None if config.max_time is None else number(
            "max_time", config.max_time, -math.inf, math.inf, "None or a number of seconds, and no NaN"),
        draft_tokens=_draft_tokens(config.prompt_lookup_num_tokens), **drawn,
    )


# Integers that only the host's Python reads: the length is cut to what there is room for, ids that no token has are
# dropped.
_UNBOUNDED = ("max_new_tokens", "eos_token_ids")
_NAMES_IN_CONFIG = dict.fromkeys(("decay_start", "decay_factor"), "exponential_decay_length_penalty")


def _check_numbers(spec: RequestSpec | Edits) -> None:
    """Raise ValueError for the first field with a number that does not fit into the int32 or float32 of kernels."""
    for name, value in vars(spec).items():
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


def _same(value: Any, neutral: Any) -> bool:
    """Return whether values are equal, where 0 is not False and 1 is not True."""
    if isinstance(neutral, bool) or isinstance(value, bool) or neutral is None:
        return value is neutral
    return isinstance(value, (int, float, str)) and value == neutral


def edits_from_config(config: GenerationConfig, eos: tuple[int, ...], vocab_size: int) -> Edits:
    """Return the edits of one request's logits for the options of a merged `config` with these EOS ids.

    Raises:
        ValueError, TypeError: naming the option, its value, and what transformers' processor says of it.
    """
    context, draws, fields = Context(eos, vocab_size), config.do_sample, dict[str, Any]()
    for option in EDITS:
        value = getattr(config, option.name, None)
        if value is None or (option.only_sampling and not draws):
            continue
        try:
            is_active = option.is_active(value)
        except TypeError as error:  # of a comparison
            kind = type(value).__name__
            raise TypeError(f"{option.name}={value!r:.200}: expected None or a number, got {kind}") from error
        if not is_active:
            continue
        assert option.edits is not None
        try:
            fields |= option.edits(value, context)
        except Exception as error:  # a value of a wrong type may make transformers raise any exception
            raise ValueError(f"{option.name}={value!r:.200}: {error}") from error
    if not fields:
        return NEUTRAL
    edits = Edits(**fields)
    if edits.decay_start is not None and not all(0 <= token < vocab_size for token in eos):
        raise ValueError(f"eos_token_id={list(eos)!r:.200}: expected token ids in [0, {vocab_size}) with "
                         "exponential_decay_length_penalty, which scores them")
    return edits


def _decay_overflows(edits: Edits, max_new_tokens: int) -> bool:
    """Return whether stock's length penalty, a power in Python's floats, overflows before the last new token."""
    assert edits.decay_start is not None
    try:
        return not math.isfinite(edits.decay_factor ** max(0, max_new_tokens - edits.decay_start))
    except (OverflowError, ZeroDivisionError):
        return True
