"""Several linear layers' weights in one piece of memory, while each stays a parameter of its own.

Every weight becomes a tensor with a storage object of its own over its slice of the merged memory (through DLPack). A
plain view of the merged tensor would share its storage, and accelerate and safetensors would then drop or refuse keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_paged.integration.models.plain_linear import is_plain_product

# Merged storages cannot be resized any more. On a CPU separate products are as fast, so nobody has to put up with it.
MERGED_ON = ("cuda",)


class MergedWeight:
    """The weights [n_i, k] of linear layers as one [sum n_i, k], for one GEMM in place of several."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = list(weights)
        # Under inference mode the memory could not be written by an optimizer later.
        with torch.inference_mode(False), torch.no_grad():
            self._memory = torch.cat([weight.data for weight in weights])
            self._slices = list(self._memory.split([len(weight) for weight in weights]))
            for weight, rows in zip(weights, self._slices, strict=True):
                weight.data = torch.from_dlpack(rows)

    @staticmethod
    def of(linears: Sequence[nn.Module]) -> MergedWeight | None:
        """Merge the weights of `linears`, or None where one of them is not a plain layer that owns its memory."""
        if not all(map(is_plain_product, linears)):
            return None
        weights: list = [linear.weight for linear in linears]
        first = weights[0]
        if first.device.type not in MERGED_ON:
            return None
        if all(_owns_memory(w) and (w.dtype, w.device) == (first.dtype, first.device) for w in weights):
            return MergedWeight(weights)
        return None

    def current(self) -> torch.Tensor | None:
        """The merged tensor, or None once somebody gave one of the weights other memory or replaced it."""
        intact = all(
            (w.data_ptr(), w.shape, w.stride(), w.dtype) == (rows.data_ptr(), rows.shape, rows.stride(), rows.dtype)
            for w, rows in zip(self._weights, self._slices, strict=True)
        )
        return self._memory if intact else None

    def belongs_to(self, linears: Sequence[nn.Module]) -> bool:
        """True while `linears` are plain layers that hold the very parameters that were merged."""
        pairs = zip(linears, self._weights, strict=True)
        return all(is_plain_product(linear) and linear.weight is weight for linear, weight in pairs)

    def release(self) -> None:
        """Give every weight that still lies in here memory of its own, but one that somebody holds an alias of."""
        with torch.inference_mode(False), torch.no_grad():
            for weight, rows in zip(self._weights, self._slices, strict=True):
                if weight.data_ptr() == rows.data_ptr() and not _has_alias(weight):
                    weight.data = weight.data.clone()


def _has_alias(tensor: torch.Tensor) -> bool:
    """Does anybody else (a state_dict, a `.data`, a numpy array) hold this tensor's storage?"""
    fresh = torch.empty(1, dtype=torch.uint8, device="cpu")
    users, alone = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (tensor, fresh))
    return users > alone


def _owns_memory(weight: torch.Tensor) -> bool:
    """Nobody else holds this memory, who would go on writing to the old place: no flat buffer, state_dict, process."""
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and weight.storage_offset() == 0
        and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        and weight.device.type != "meta"
        and not (weight.device.type == "cpu" and weight.is_shared())
        and not _has_alias(weight)
        and not weight.is_inference()
    )
