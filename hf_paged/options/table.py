"""The table of generation options: one row an option says how hf_paged carries it out; everything else derives from it.

`tools/options_table.py` writes docs/options.md from it, and tests enumerate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.options import option_values as values

NATIVE = "native"  # the engine carries the option out
INERT = "inert"  # the option changes nothing in greedy search or sampling, whatever its value
LOCKSTEP = "lockstep"  # stock's own decoding loop carries the option out over the engine's forwards
STOCK = "stock"  # stock alone carries the option out
ARGUMENT = "argument"  # an argument of hf_paged's own calls, which transformers ignores in a config
PATHS = (NATIVE, INERT, LOCKSTEP, STOCK, ARGUMENT)

# Order classes of processors. A mask writes -inf, whatever the score was, to tokens that do not depend on scores: masks
# give the same scores in any order. A scale leaves -inf where it is, and looks at each score alone.
MASK, SCALE = "mask", "scale"


@dataclass(frozen=True)
class Option:
    """One option. The value None always means that the option is off.

    Attributes:
        path: one of `PATHS`.
        neutral: values that change no token.
        made: the class of processor or criterion that stock makes for the option.
        only_sampling: greedy search ignores the option.
        is_active: whether stock makes that class for a value that is not None.
        edits: fields of `Edits` by a value that is active (see `option_values`).
        draws: the checked value by the name and the value, of an option that is a field of `Drawing`.
        of_processor: the value by a processor of class `made` and the number of tokens of the padded prompts.
        off: the value with which stock makes no processor.
        order: `MASK`, `SCALE` or None for any other processor.
        shapes_result: the option says what `model.generate` returns besides the tokens.
    """

    name: str
    path: str
    neutral: tuple[Any, ...] = (None, False)
    made: type | None = None
    only_sampling: bool = False
    is_active: Callable[[Any], bool] = lambda value: True
    edits: Callable[[Any, values.Context], dict[str, Any]] | None = None
    draws: Callable[[str, Any], float | int] | None = None
    of_processor: Callable[[Any, int], Any] | None = None
    off: Any = None
    order: str | None = None
    shapes_result: bool = False

    def makes(self, value: Any) -> bool:
        """Whether stock makes the option's class for this value; may raise TypeError for a value of another type."""
        return value is not None and bool(self.is_active(value))


# Options with processors, in the order in which stock applies these.
_PROCESSORS = (
    Option("guidance_scale", LOCKSTEP, (None, 1, 1.0), made=processors.UnbatchedClassifierFreeGuidanceLogitsProcessor),
    Option("sequence_bias", NATIVE, made=processors.SequenceBiasLogitsProcessor, edits=values.sequence_bias,
           of_processor=lambda p, _: dict(p.sequence_bias)),
    Option("encoder_repetition_penalty", LOCKSTEP, (None, 1.0),
           made=processors.EncoderRepetitionPenaltyLogitsProcessor),
    Option("repetition_penalty", NATIVE, made=processors.RepetitionPenaltyLogitsProcessor, order=SCALE,
           is_active=lambda value: value != 1.0, edits=values.repetition_penalty, of_processor=lambda p, _: p.penalty),
    Option("no_repeat_ngram_size", NATIVE, made=processors.NoRepeatNGramLogitsProcessor, order=MASK,
           is_active=lambda value: value > 0, edits=values.ngram_size, of_processor=lambda p, _: p.ngram_size),
    Option("encoder_no_repeat_ngram_size", LOCKSTEP, (None, 0), made=processors.EncoderNoRepeatNGramLogitsProcessor),
    Option("bad_words_ids", NATIVE, made=processors.NoBadWordsLogitsProcessor, order=MASK, edits=values.bad_words,
           of_processor=lambda p, _: p.bad_word_ids),
    Option("min_length", NATIVE, made=processors.MinLengthLogitsProcessor, order=MASK,
           is_active=lambda value: value > 0, of_processor=lambda p, _: p.min_length),
    Option("min_new_tokens", NATIVE, made=processors.MinNewTokensLengthLogitsProcessor, order=MASK,
           is_active=lambda value: value > 0, of_processor=lambda p, _: p.min_new_tokens),
    Option("forced_bos_token_id", NATIVE, made=processors.ForcedBOSTokenLogitsProcessor, edits=values.forced_bos,
           of_processor=lambda p, _: p.bos_token_id),
    Option("forced_eos_token_id", NATIVE, made=processors.ForcedEOSTokenLogitsProcessor, edits=values.forced_eos,
           of_processor=lambda p, _: values.as_list(p.eos_token_id)),
    Option("remove_invalid_values", NATIVE, made=processors.InfNanRemoveLogitsProcessor, off=False,
           is_active=lambda value: value is True, edits=lambda value, _: {"remove_invalid_values": True},
           of_processor=lambda p, _: True),
    Option("exponential_decay_length_penalty", NATIVE, made=processors.ExponentialDecayLengthPenalty,
           edits=values.length_penalty,
           of_processor=lambda p, width: (p.regulation_start - width, p.regulation_factor)),
    Option("suppress_tokens", NATIVE, made=processors.SuppressTokensLogitsProcessor, order=MASK,
           edits=lambda value, _: {"suppress_tokens": values.ids(list(value))},
           of_processor=lambda p, _: values.as_list(p.suppress_tokens)),
    Option("begin_suppress_tokens", NATIVE, made=processors.SuppressTokensAtBeginLogitsProcessor, order=MASK,
           edits=lambda value, _: {"begin_suppress_tokens": values.ids(list(value))},
           of_processor=lambda p, _: values.as_list(p.begin_suppress_tokens)),
    Option("temperature", NATIVE, (1.0,), made=processors.TemperatureLogitsWarper, only_sampling=True, order=SCALE,
           is_active=lambda value: value != 1.0, draws=values.temperature, of_processor=lambda p, _: p.temperature),
    Option("top_h", LOCKSTEP, made=processors.TopHLogitsWarper, only_sampling=True),
    Option("top_k", NATIVE, (0,), made=processors.TopKLogitsWarper, only_sampling=True, off=0,
           is_active=lambda value: value != 0, draws=values.top_k, of_processor=lambda p, _: p.top_k),
    Option("top_p", NATIVE, (1.0,), made=processors.TopPLogitsWarper, only_sampling=True,
           is_active=lambda value: value < 1.0, draws=values.share, of_processor=lambda p, _: p.top_p),
    Option("min_p", NATIVE, (0.0,), made=processors.MinPLogitsWarper, only_sampling=True, draws=values.share,
           of_processor=lambda p, _: p.min_p),
    Option("typical_p", NATIVE, made=processors.TypicalLogitsWarper, only_sampling=True,
           is_active=lambda value: value < 1.0, edits=values.typical_p, of_processor=lambda p, _: p.mass),
    Option("epsilon_cutoff", NATIVE, made=processors.EpsilonLogitsWarper, only_sampling=True,
           is_active=lambda value: 0.0 < value < 1.0, edits=values.epsilon_cutoff, of_processor=lambda p, _: p.epsilon),
    Option("eta_cutoff", NATIVE, made=processors.EtaLogitsWarper, only_sampling=True,
           is_active=lambda value: 0.0 < value < 1.0, edits=values.eta_cutoff,
           of_processor=lambda p, _: float(p.epsilon)),
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
            is_made = option.makes(value)
        except (TypeError, ValueError, RuntimeError):  # not a value for this option; `settings_from_config` names it
            is_made = True
        if is_made:
            yield _MADE[name]
