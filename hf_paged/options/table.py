"""The table of generation options: one row an option says how hf_paged carries it out; everything else derives from it.

`tools/options_table.py` writes docs/options.md from it, and tests enumerate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.errors import Reason
from hf_paged.guards.original_classes import patched_class

NATIVE = "native"  # the engine carries the option out
INERT = "inert"  # the option changes nothing in greedy search or sampling, whatever its value
LOCKSTEP = "lockstep"  # stock's own decoding loop carries the option out over the engine's forwards
STOCK = "stock"  # stock alone carries the option out
ARGUMENT = "argument"  # an argument of hf_paged's own calls, which transformers ignores in a config
PATHS = (NATIVE, INERT, LOCKSTEP, STOCK, ARGUMENT)

# Order classes of processors. A mask writes -inf, whatever the score was, to tokens that do not depend on scores: masks
# give the same scores in any order. A scale leaves -inf where it is, and looks at each score alone.
MASK, SCALE = "mask", "scale"
ALWAYS = (processors.LogitsProcessorList, criteria.StoppingCriteriaList, criteria.MaxLengthCriteria)


# -- values, checked by transformers' own processors and as the engine keeps them --------------------------------------

# Functions that `Option.edits` names take a value and its `Context` and return fields of `Edits`; those that
# `Option.draws` names take the option's name and its value and return the checked number. The caller of the first puts
# the option's name and value in front of what they raise.
FLOAT32 = torch.finfo(torch.float32)


class Context(NamedTuple):
    """The context in which values are checked: the EOS ids of the config, and the number of logits of a token."""

    eos: tuple[int, ...]
    vocab_size: int


def number(name: str, value: Any, least: float, most: float, expected: str = "") -> float:
    """Return the value as a float; raises TypeError for another type, ValueError outside of [least, most] and for NaN.

    ``expected``: words for such a number.
    """
    expected = expected or f"a number in [{least:g}, {most:g}]"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}: expected {expected}, got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}={value!r:.80}: expected {expected}")
    return float(value)


def share(name: str, value: Any) -> float:
    return number(name, value, 0, 1)


def temperature(name: str, value: Any) -> float:
    return number(name, value, FLOAT32.tiny, FLOAT32.max, "a float32 number above 0 (do_sample=False for greedy)")


def top_k(name: str, value: Any) -> int:
    """An integer of at least 0, which `settings_from_config` knows to be an integer."""
    if value < 0:
        raise ValueError(f"{name}={value!r}: expected None or an integer of at least 0 (0: off)")
    return value


def ids(value: Any) -> tuple[int, ...]:
    """Return an id, or a list or tensor of ids, as a tuple."""
    found = torch.as_tensor(value, dtype=None, device="cpu")  # the values' own dtype, which is looked at
    if found.is_floating_point() or found.dtype == torch.bool:
        raise TypeError("expected token ids")
    return tuple(found.flatten().tolist())


def as_list(value: Any) -> Any:
    """Return the ids of a tensor as a list, and any other value unchanged."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def sequence_bias(value: Any, context: Context) -> dict[str, Any]:
    """Return biases of sequences, rounded to torch's default dtype, as in the tensor of stock's processor."""
    found = processors.SequenceBiasLogitsProcessor(sequence_bias=value).sequence_bias
    rounded = {tokens: float(torch.tensor(bias, dtype=torch.get_default_dtype(), device="cpu"))
               for tokens, bias in found.items()}
    bias = tuple((tuple(map(int, tokens)), number) for tokens, number in rounded.items())
    _check_sequences(value, [tokens for tokens, _ in bias], context)
    return {"sequence_bias": bias}


def bad_words(value: Any, context: Context) -> dict[str, Any]:
    """Return sequences that may not be completed, without single EOS tokens, which stock drops."""
    found = processors.NoBadWordsLogitsProcessor(value, _tensor(context.eos) if context.eos else None).sequence_bias
    sequences = tuple(tuple(map(int, tokens)) for tokens in found)
    _check_sequences(value, sequences, context)
    return {"bad_words_ids": sequences}


def ngram_size(value: Any, context: Context) -> dict[str, Any]:
    """A number of tokens; True makes a processor in stock that raises when it is called."""
    if isinstance(value, bool):
        raise TypeError("expected an integer")
    return {"no_repeat_ngram_size": processors.NoRepeatNGramLogitsProcessor(value).ngram_size}


def forced_bos(value: Any, context: Context) -> dict[str, Any]:
    found = ids(value)[0]
    _check_range([found], context)
    return {"forced_bos_token_id": found}


def forced_eos(value: Any, context: Context) -> dict[str, Any]:
    found = ids(value)
    _check_range(found, context)
    return {"forced_eos_token_ids": found}


def length_penalty(value: Any, context: Context) -> dict[str, Any]:
    """The number of new tokens behind which EOS is favoured, and the base of the power by which it is."""
    if not context.eos:
        raise ValueError("expected an eos_token_id with it")
    made = processors.ExponentialDecayLengthPenalty(value, _tensor(context.eos), 0)
    return {"decay_start": int(made.regulation_start), "decay_factor": float(made.regulation_factor)}


def _check_sequences(value: Any, sequences: Iterable[tuple[int, ...]], context: Context) -> None:
    if _holds_bool(value):
        raise ValueError("holds True or False, expected token ids")
    if not all(sequences):
        raise ValueError("holds an empty sequence, expected token ids")
    _check_range((token for sequence in sequences for token in sequence), context)


def _check_range(tokens: Iterable[int], context: Context) -> None:
    if (wrong := next((token for token in tokens if not 0 <= token < context.vocab_size), None)) is not None:
        raise ValueError(f"holds {wrong}, expected token ids in [0, {context.vocab_size})")


def _holds_bool(value: Any) -> bool:
    """Whether a bool stands among ids: Python takes it for 0 or 1, stock's indexing does not."""
    if isinstance(value, dict):
        value = [*value]
    return isinstance(value, bool) or (isinstance(value, (list, tuple)) and any(map(_holds_bool, value)))


def _tensor(tokens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option. The value None always means that the option is off."""

    name: str
    path: str  # one of `PATHS`
    neutral: tuple[Any, ...] = (None, False)  # values that change no token
    made: type | None = None  # the class of processor or criterion that stock makes for the option
    only_sampling: bool = False  # greedy search ignores the option
    is_active: Callable[[Any], bool] = lambda value: True  # whether stock makes that class for a value but None
    # Fields of `Edits` by a value that is active.
    edits: Callable[[Any, Context], dict[str, Any]] | None = None
    # The checked value by the name and the value, of an option that is a field of `Drawing`.
    draws: Callable[[str, Any], float | int] | None = None
    # The value by a processor of class `made` and the number of tokens of the padded prompts.
    of_processor: Callable[[Any, int], Any] | None = None
    off: Any = None  # the value with which stock makes no processor
    order: str | None = None  # `MASK`, `SCALE` or None for any other processor
    shapes_result: bool = False  # the option says what `model.generate` returns besides the tokens

    def makes(self, value: Any) -> bool:
        """Whether stock makes the option's class for this value; may raise TypeError for a value of another type."""
        return value is not None and bool(self.is_active(value))


# Options with processors, in the order in which stock applies these.
_PROCESSORS = (
    Option("guidance_scale", LOCKSTEP, (None, 1, 1.0), made=processors.UnbatchedClassifierFreeGuidanceLogitsProcessor),
    Option("sequence_bias", NATIVE, made=processors.SequenceBiasLogitsProcessor, edits=sequence_bias,
           of_processor=lambda p, _: dict(p.sequence_bias)),
    Option("encoder_repetition_penalty", LOCKSTEP, (None, 1.0),
           made=processors.EncoderRepetitionPenaltyLogitsProcessor),
    Option("repetition_penalty", NATIVE, made=processors.RepetitionPenaltyLogitsProcessor, order=SCALE,
           is_active=lambda value: value != 1.0, of_processor=lambda p, _: p.penalty,
           edits=lambda value, _: {"repetition_penalty": processors.RepetitionPenaltyLogitsProcessor(value).penalty}),
    Option("no_repeat_ngram_size", NATIVE, made=processors.NoRepeatNGramLogitsProcessor, order=MASK,
           is_active=lambda value: value > 0, edits=ngram_size, of_processor=lambda p, _: p.ngram_size),
    Option("encoder_no_repeat_ngram_size", LOCKSTEP, (None, 0), made=processors.EncoderNoRepeatNGramLogitsProcessor),
    Option("bad_words_ids", NATIVE, made=processors.NoBadWordsLogitsProcessor, order=MASK, edits=bad_words,
           of_processor=lambda p, _: p.bad_word_ids),
    Option("min_length", NATIVE, made=processors.MinLengthLogitsProcessor, order=MASK,
           is_active=lambda value: value > 0, of_processor=lambda p, _: p.min_length),
    Option("min_new_tokens", NATIVE, made=processors.MinNewTokensLengthLogitsProcessor, order=MASK,
           is_active=lambda value: value > 0, of_processor=lambda p, _: p.min_new_tokens),
    Option("forced_bos_token_id", NATIVE, made=processors.ForcedBOSTokenLogitsProcessor, edits=forced_bos,
           of_processor=lambda p, _: p.bos_token_id),
    Option("forced_eos_token_id", NATIVE, made=processors.ForcedEOSTokenLogitsProcessor, edits=forced_eos,
           of_processor=lambda p, _: as_list(p.eos_token_id)),
    Option("remove_invalid_values", NATIVE, made=processors.InfNanRemoveLogitsProcessor, off=False,
           is_active=lambda value: value is True, edits=lambda value, _: {"remove_invalid_values": True},
           of_processor=lambda p, _: True),
    Option("exponential_decay_length_penalty", NATIVE, made=processors.ExponentialDecayLengthPenalty,
           edits=length_penalty,
           of_processor=lambda p, width: (p.regulation_start - width, p.regulation_factor)),
    Option("suppress_tokens", NATIVE, made=processors.SuppressTokensLogitsProcessor, order=MASK,
           edits=lambda value, _: {"suppress_tokens": ids(list(value))},
           of_processor=lambda p, _: as_list(p.suppress_tokens)),
    Option("begin_suppress_tokens", NATIVE, made=processors.SuppressTokensAtBeginLogitsProcessor, order=MASK,
           edits=lambda value, _: {"begin_suppress_tokens": ids(list(value))},
           of_processor=lambda p, _: as_list(p.begin_suppress_tokens)),
    Option("temperature", NATIVE, (1.0,), made=processors.TemperatureLogitsWarper, only_sampling=True, order=SCALE,
           is_active=lambda value: value != 1.0, draws=temperature, of_processor=lambda p, _: p.temperature),
    Option("top_h", LOCKSTEP, made=processors.TopHLogitsWarper, only_sampling=True),
    Option("top_k", NATIVE, (0,), made=processors.TopKLogitsWarper, only_sampling=True, off=0,
           is_active=lambda value: value != 0, draws=top_k, of_processor=lambda p, _: p.top_k),
    Option("top_p", NATIVE, (1.0,), made=processors.TopPLogitsWarper, only_sampling=True,
           is_active=lambda value: value < 1.0, draws=share, of_processor=lambda p, _: p.top_p),
    Option("min_p", NATIVE, (0.0,), made=processors.MinPLogitsWarper, only_sampling=True, draws=share,
           of_processor=lambda p, _: p.min_p),
    Option("typical_p", NATIVE, made=processors.TypicalLogitsWarper, only_sampling=True,
           is_active=lambda value: value < 1.0, of_processor=lambda p, _: p.mass,
           edits=lambda value, _: {"typical_p": float(processors.TypicalLogitsWarper(mass=value).mass)}),
    Option("epsilon_cutoff", NATIVE, made=processors.EpsilonLogitsWarper, only_sampling=True,
           is_active=lambda value: 0.0 < value < 1.0, of_processor=lambda p, _: p.epsilon,
           edits=lambda value, _: {"epsilon_cutoff": float(processors.EpsilonLogitsWarper(epsilon=value).epsilon)}),
    Option("eta_cutoff", NATIVE, made=processors.EtaLogitsWarper, only_sampling=True,
           is_active=lambda value: 0.0 < value < 1.0, of_processor=lambda p, _: float(p.epsilon),
           edits=lambda value, _: {"eta_cutoff": float(processors.EtaLogitsWarper(epsilon=value).epsilon)}),
    Option("watermarking_config", LOCKSTEP, made=processors.WatermarkLogitsProcessor),
    Option("renormalize_logits", NATIVE, made=processors.LogitNormalization, off=False,
           is_active=lambda value: value is True, edits=lambda value, _: {"renormalize_logits": True},
           of_processor=lambda p, _: True),
)
_OTHERS = (
    Option("max_length", NATIVE),
    Option("max_new_tokens", NATIVE),
    Option("do_sample", NATIVE),
    Option("eos_token_id", NATIVE, made=criteria.EosTokenCriteria),
    Option("pad_token_id", NATIVE),
    Option("num_return_sequences", NATIVE),
    Option("prompt_lookup_num_tokens", NATIVE),
    Option("max_time", NATIVE, made=criteria.MaxTimeCriteria),
    Option("stop_strings", NATIVE, made=criteria.StopStringCriteria),
    Option("num_beams", LOCKSTEP, (None, 1)),
    # Without `return_dict_in_generate` the two options below it have no effect; with it alone a call is native.
    Option("return_dict_in_generate", LOCKSTEP, shapes_result=True),
    Option("output_scores", LOCKSTEP, shapes_result=True),
    Option("output_logits", LOCKSTEP, shapes_result=True),
    Option("use_cache", STOCK, (None, True, False)),  # the engine has a cache in any case; the tokens are the same
    Option("cache_implementation", STOCK, (None, "dynamic")),
    Option("num_beam_groups", STOCK, (None, 1)),
    Option("diversity_penalty", STOCK, (None, 0.0)),
    *(Option(name, STOCK) for name in (
        "token_healing", "use_mtp", "is_assistant", "output_attentions", "output_hidden_states", "assistant_early_exit",
        "compile_config", "constraints", "dola_layers", "force_words_ids", "penalty_alpha", "prefill_chunk_size",
    )),
    *(Option(name, INERT) for name in (
        "bos_token_id", "decoder_start_token_id", "early_stopping", "length_penalty", "low_memory", "max_cache_len",
        "cache_config", "disable_compile", "continuous_batching_config", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
        "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
        "transformers_version",
    )),
    *(Option(name, ARGUMENT, (None, False, 0.0)) for name in ("presence_penalty", "frequency_penalty")),
)
OPTIONS: dict[str, Option] = {option.name: option for option in (*_PROCESSORS, *_OTHERS)}
EDITS = tuple(option for option in OPTIONS.values() if option.edits is not None)
DRAWS = tuple(option for option in OPTIONS.values() if option.draws is not None)


def names(*paths: str) -> tuple[str, ...]:
    """Return the names of the options with one of these paths."""
    return tuple(option.name for option in OPTIONS.values() if option.path in paths)


def option_of(name: str) -> Option:
    """Return the row of an option; an unknown option is left to stock unless its value is None or False."""
    return OPTIONS.get(name) or Option(name, STOCK)


_MADE = {name: option.made for name, option in OPTIONS.items() if option.path == NATIVE and option.made is not None}


def classes(config: GenerationConfig) -> Iterator[type]:
    """Yield the classes of processors and criteria that stock makes for the native options of a merged config."""
    for name, value in vars(config).items():
        if value is None or name not in _MADE:
            continue
        option = OPTIONS[name]
        if option.only_sampling and not config.do_sample:
            continue
        try:
            is_made = option.is_active(value)
        except (TypeError, ValueError, RuntimeError):  # not a value for this option; `settings_from_config` names it
            is_made = True
        if is_made:
            yield _MADE[name]


def patched_code(kinds: Iterable[type]) -> Reason | None:
    """Return the reason that names a patched method of processors and criteria of these classes, or None."""
    if (place := patched_class(kinds)) is None:
        return None
    return Reason("{} is patched, which the paged engine would not run", place,
                  remedy="Some code replaced a class or method of transformers that this option uses. Undo the patch; "
                         "lockstep runs it as it is.")
