"""LoRA updates of experts' weights as kernels take them: PEFT's own tensors, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_paged.kernels.experts.fold import MOST_RANK, ExpertUpdate
from hf_paged.models.expert_lora.folding import active_adapters, merged_but_off, wrappers_of
from hf_paged.models.layer_ops import is_untouched
from hf_paged.models.tuners import inside_wrappers
from hf_paged.parallel.layers import UpdateMatrix

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def updates_of(experts: Any) -> dict[str, ExpertUpdate] | str:
    """Return the updates of experts' weights by the weight's name, or why kernels do not fold them.

    A step reads the tensors where they are, so a trained adapter needs no renewal.
    """
    found: dict[str, ExpertUpdate] = {}
    inner = inside_wrappers(experts)
    for wrapper in wrappers_of(experts):
        if merged_but_off(wrapper):
            return "the LoRA of experts has merged adapters, and is switched off"
        if not (names := active_adapters(wrapper)):
            continue
        name = wrapper.parameter_name
        if len(names) > 1:
            return f"the LoRA of experts has {len(names)} active adapters"
        if not hasattr(wrapper, "get_delta_factors"):
            return "the LoRA of experts has the roundings of a PEFT before 0.21"
        a, b = wrapper.lora_A[names[0]], wrapper.lora_B[names[0]]
        if not _are_plain(a, b, inner._parameters[name], is_transposed=not wrapper._did_swap_in_out_features):
            return "the LoRA of experts has other tensors than PEFT's A and B"
        update = ExpertUpdate(a.weight, b.weight, float(wrapper.scaling[names[0]]))
        if update.rank(wrapper.num_experts) > MOST_RANK:
            return f"the LoRA of experts has a rank of more than {MOST_RANK}"
        found[name] = update
    return found


def _are_plain(a: Any, b: Any, weight: Any, *, is_transposed: bool) -> bool:
    known = (nn.Linear, UpdateMatrix)  # whole, or this rank's part
    if not all(type(matrix) in known and is_untouched(matrix) and matrix.bias is None for matrix in (a, b)):
        return False
    num_experts, (rows, columns) = len(weight), weight.shape[1:]
    if is_transposed:
        rows, columns = columns, rows
    rank = len(a.weight) // num_experts
    shapes = tuple(a.weight.shape), tuple(b.weight.shape)
    if not rank or shapes != ((rank * num_experts, columns), (rows, rank * num_experts)):
        return False
    alike = {(t.dtype, t.device, t.is_contiguous()) for t in (a.weight, b.weight)}
    return alike == {(a.weight.dtype, weight.device, True)} and a.weight.dtype in _DTYPES
