"""Does stock carry out an option by code of its own still, or has somebody patched the class that it makes for it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.integration.models.originals import patched_class
from hf_paged.logits_options import GREEDY_TOO, SAMPLING_ONLY

# By option: the class that stock makes for it, and when; None: as `logits_options` has it.
_Made = tuple[type, "Callable[[Any], bool] | None"]
MADE_FOR: dict[str, _Made] = {
    "sequence_bias": (processors.SequenceBiasLogitsProcessor, None),
    "repetition_penalty": (processors.RepetitionPenaltyLogitsProcessor, None),
    "no_repeat_ngram_size": (processors.NoRepeatNGramLogitsProcessor, None),
    "bad_words_ids": (processors.NoBadWordsLogitsProcessor, None),
    "min_length": (processors.MinLengthLogitsProcessor, lambda value: value is not None and value > 0),
    "min_new_tokens": (processors.MinNewTokensLengthLogitsProcessor, lambda value: value is not None and value > 0),
    "forced_bos_token_id": (processors.ForcedBOSTokenLogitsProcessor, None),
    "forced_eos_token_id": (processors.ForcedEOSTokenLogitsProcessor, None),
    "remove_invalid_values": (processors.InfNanRemoveLogitsProcessor, None),
    "exponential_decay_length_penalty": (processors.ExponentialDecayLengthPenalty, None),
    "suppress_tokens": (processors.SuppressTokensLogitsProcessor, None),
    "begin_suppress_tokens": (processors.SuppressTokensAtBeginLogitsProcessor, None),
    "renormalize_logits": (processors.LogitNormalization, None),
    "max_time": (criteria.MaxTimeCriteria, lambda value: value is not None),
    "stop_strings": (criteria.StopStringCriteria, lambda value: value is not None),
    "eos_token_id": (criteria.EosTokenCriteria, lambda value: value is not None),
}
MADE_FOR_SAMPLING: dict[str, _Made] = {
    "temperature": (processors.TemperatureLogitsWarper, lambda value: value is not None and value != 1.0),
    "top_k": (processors.TopKLogitsWarper, lambda value: value is not None and value != 0),
    "top_p": (processors.TopPLogitsWarper, lambda value: value is not None and value < 1.0),
    "min_p": (processors.MinPLogitsWarper, lambda value: value is not None),
    "typical_p": (processors.TypicalLogitsWarper, None),
    "epsilon_cutoff": (processors.EpsilonLogitsWarper, None),
    "eta_cutoff": (processors.EtaLogitsWarper, None),
}
ALWAYS = (processors.LogitsProcessorList, criteria.StoppingCriteriaList, criteria.MaxLengthCriteria)


def patched_option(config: GenerationConfig) -> str | None:
    """Which class or method that stock would run for the options of a merged config is not its own, or None."""
    return patched_code([*ALWAYS, *_made_for(config)])


def patched_code(kinds: Iterable[type]) -> str | None:
    """As `patched_option`, for processors and criteria of these classes."""
    place = patched_class(kinds)
    return None if place is None else f"{place} is patched, which the paged engine would not run"


def _made_for(config: GenerationConfig) -> Iterator[type]:
    for name, value in vars(config).items():
        if value is None:  # no option makes anything of it
            continue
        made = MADE_FOR.get(name) or (MADE_FOR_SAMPLING.get(name) if config.do_sample else None)
        if made is None:
            continue
        kind, is_made = made
        try:
            if (is_made or GREEDY_TOO.get(name) or SAMPLING_ONLY[name])(value):
                yield kind
        except (TypeError, ValueError, RuntimeError):  # not a value for this option, which others say better
            yield kind
