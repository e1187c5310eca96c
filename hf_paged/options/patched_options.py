"""Detection of patches in the classes of processors and criteria that stock makes for options."""

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
    """Return the reason that names a patched class or method which stock would run for a merged config, or None."""
    return patched_code([*ALWAYS, *classes(config)])


def patched_code(kinds: Iterable[type]) -> Reason | None:
    """Return the reason of `patched_option` for processors and criteria of these classes, or None."""
    place = patched_class(kinds)
    if place is None:
        return None
    return Reason("{} is patched, which the paged engine would not run", place,
                  remedy="Some code replaced a class or method of transformers that this option uses. Undo the patch; "
                         "lockstep runs it as it is.")
