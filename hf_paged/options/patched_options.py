"""Does stock carry out an option by code of its own still, or was the class that it makes for it patched?"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.errors import Reason
from hf_paged.guards.original_classes import patched_class
from hf_paged.options.table import classes

ALWAYS = (processors.LogitsProcessorList, criteria.StoppingCriteriaList, criteria.MaxLengthCriteria)


def patched_option(config: GenerationConfig) -> Reason | None:
    """Which class or method that stock would run for the options of a merged config is not its own, or None."""
    return patched_code([*ALWAYS, *classes(config)])


def patched_code(kinds: Iterable[type]) -> Reason | None:
    """As `patched_option`, for processors and criteria of these classes."""
    place = patched_class(kinds)
    if place is None:
        return None
    return Reason("{} is patched, which the paged engine would not run", place,
                  remedy="Some code replaced a class or method of transformers that this option uses. Undo the patch; "
                         "lockstep runs it as it is.")
