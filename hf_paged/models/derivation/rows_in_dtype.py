"""Check on a clone in the dtype of calls: a row's logits do not depend on the rows beside it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.proof.checks.rows import check_other_rows
from hf_paged.models.proof.clone import clone_of
from hf_paged.models.proof.outline import farthest
from hf_paged.models.proof.reduced import reduced
from hf_paged.models.proof.subject import TOLERANCE, subject_of

# Of the logits' standard deviation. Products of the same shapes round alike. Products of experts, whose shapes follow
# the number of their tokens, do not in float32, which is left to the proof in float64.
_TOLERANCES = {torch.float32: 1e-4}


def check_rows_in(dtype: torch.dtype, cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> None:
    """Raise `Refused` if other rows of a step change a row's logits; on the CPU, for conditions on the dtype."""
    small = reduced(config)
    model: Any = clone_of(cls, small, attention)
    model = model.to(dtype)
    check_other_rows(subject_of(model, attention, farthest(small)), _TOLERANCES.get(dtype, TOLERANCE))
