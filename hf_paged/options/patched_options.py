"""Does stock carry out an option by code of its own still, or was the class that it makes for it patched?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.errors import Reason
from hf_paged.guards.originals import patched_class
from hf_paged.options.logits_options import GREEDY_TOO, SAMPLING_ONLY

# By option, of which None always means that it is not asked for: the class that stock makes for it.
MADE_FOR: dict[str, type] = {
    "sequence_bias": processors.SequenceBiasLogitsProcessor,
    "repetition_penalty": processors.RepetitionPenaltyLogitsProcessor,
    "no_repeat_ngram_size": processors.NoRepeatNGramLogitsProcessor,
    "bad_words_ids": processors.NoBadWordsLogitsProcessor,
    "min_length": processors.MinLengthLogitsProcessor,
    "min_new_tokens": processors.MinNewTokensLengthLogitsProcessor,
    "forced_bos_token_id": processors.ForcedBOSTokenLogitsProcessor,
    "forced_eos_token_id": processors.ForcedEOSTokenLogitsProcessor,
    "remove_invalid_values": processors.InfNanRemoveLogitsProcessor,
    "exponential_decay_length_penalty": processors.ExponentialDecayLengthPenalty,
    "suppress_tokens": processors.SuppressTokensLogitsProcessor,
    "begin_suppress_tokens": processors.SuppressTokensAtBeginLogitsProcessor,
    "renormalize_logits": processors.LogitNormalization,
    "max_time": criteria.MaxTimeCriteria,
    "stop_strings": criteria.StopStringCriteria,
    "eos_token_id": criteria.EosTokenCriteria,
}
MADE_FOR_SAMPLING: dict[str, type] = {
    "temperature": processors.TemperatureLogitsWarper,
    "top_k": processors.TopKLogitsWarper,
    "top_p": processors.TopPLogitsWarper,
    "min_p": processors.MinPLogitsWarper,
    "typical_p": processors.TypicalLogitsWarper,
    "epsilon_cutoff": processors.EpsilonLogitsWarper,
    "eta_cutoff": processors.EtaLogitsWarper,
}
# When it makes it, where any value but None does not do: here, or in `logits_options`.
_IS_ASKED: dict[str, Callable[[Any], bool]] = GREEDY_TOO | SAMPLING_ONLY | {
    "min_length": lambda value: value > 0,
    "min_new_tokens": lambda value: value > 0,
    "temperature": lambda value: value != 1.0,
    "top_k": lambda value: value != 0,
    "top_p": lambda value: value < 1.0,
}
ALWAYS = (processors.LogitsProcessorList, criteria.StoppingCriteriaList, criteria.MaxLengthCriteria)


def patched_option(config: GenerationConfig) -> Reason | None:
    """Which class or method that stock would run for the options of a merged config is not its own, or None."""
    return patched_code([*ALWAYS, *_made_for(config)])


def patched_code(kinds: Iterable[type]) -> Reason | None:
    """As `patched_option`, for processors and criteria of these classes."""
    place = patched_class(kinds)
    if place is None:
        return None
    return Reason("{} is patched, which the paged engine would not run", place,
                  remedy="Some code replaced a class or method of transformers that this option uses. Undo the patch; "
                         "lockstep runs it as it is.")


def _made_for(config: GenerationConfig) -> Iterator[type]:
    options = MADE_FOR | MADE_FOR_SAMPLING if config.do_sample else MADE_FOR
    for name, value in vars(config).items():
        if value is not None and name in options and _is_asked(name, value):
            yield options[name]


def _is_asked(name: str, value: Any) -> bool:
    try:
        return name not in _IS_ASKED or bool(_IS_ASKED[name](value))
    except (TypeError, ValueError, RuntimeError):  # not a value for this option; `settings_from_config` names it
        return True
