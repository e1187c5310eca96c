"""Devices and models for which all layers of a decoder run in one launch; the kernel is only imported there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import num_multiprocessors, shared_memory
from hf_paged.kernels import hopper
from hf_paged.kernels.hopper.decoder_layers.shape import HEAD_DIM, PROGRAMS, ROWS, SHARED_BYTES

logger = logging.getLogger(__name__)

# Of keys and values, for which some programs wait while others read theirs: more take longer than one launch saves.
_MOST_IDLE_POSITIONS = 8192

_refused: dict[torch.device, str] = {}


class Decoder(NamedTuple):
    """What the kernel reads of a model.

    ``layers`` have the fields of `LayerTensors`: the weights qkv, o, gate_up and down, the caches of
    keys and values [blocks, block size, Hkv, 128], the input norm and the norm behind attention, the norms of query and
    key heads or None.
    """

    layers: tuple[tuple[torch.Tensor | None, ...], ...]
    final_norm: torch.Tensor
    eps: float
    scale: float

    def key(self) -> tuple:
        """Return a key that differs if a tensor is another one or has moved."""
        tensors = [self.final_norm, *(tensor for layer in self.layers for tensor in layer)]
        places = (None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors)
        return self.eps, self.scale, *places


def why_not_on(device: torch.device) -> str | None:
    """Return why the kernel cannot run on `device`, or None."""
    return _refused.get(device) or _why_not_on(device)


@lru_cache(maxsize=64)
def _why_not_on(device: torch.device) -> str | None:
    return hopper.why_not_on(device, partial(_refusal, device))


def _refusal(device: torch.device, major: int, minor: int) -> str | None:
    if (major, minor) != (9, 0):
        return f"does not run on compute capability {major}.{minor}"
    if (count := num_multiprocessors(device)) < PROGRAMS:  # a part of a GPU (MIG)
        return f"needs {PROGRAMS} multiprocessors, not {count}"
    if (size := shared_memory(device)) < SHARED_BYTES:
        return f"needs {SHARED_BYTES} bytes of shared memory, not {size}"
    return None


def refuse(device: torch.device, error: Exception) -> None:
    """Exclude `device`, on which the kernel failed to compile or to start, from now on."""
    if device not in _refused:
        logger.warning("hf_paged: steps of few rows run layer by layer on %s, since the kernel for all layers failed: "
                       "%r", device, error)
        _refused[device] = f"failed: {error!r}"


def pays_off(rows: int, lengths: np.ndarray) -> bool:
    """Return whether one launch takes less time than many for these rows (some are padding) and their positions.

    Programs are shared out among rows evenly, however long these are, and the longest row's are the last to end.
    """
    return rows in ROWS and rows * int(lengths.max()) - int(lengths.sum()) <= _MOST_IDLE_POSITIONS


def why_not_of(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernel does not compute in this dtype, with heads of this size, or None."""
    if dtype == torch.bfloat16 and head_dim == HEAD_DIM:
        return None
    return f"takes torch.bfloat16 and a head_dim of {HEAD_DIM}, not {dtype} and {head_dim}"


def are_alike(decoder: Decoder) -> bool:
    """Return whether the shapes fit each other and are the same in all layers, as the kernel requires."""
    qkv, o, gate_up, down, keys, values, *norms, q_norm, k_norm = _shapes(decoder.layers[0])
    if len(set(map(_shapes, decoder.layers))) > 1 or down is None or o is None or keys is None:
        return False
    (hidden, inner), mixed, (_, _, kv_heads, head_dim) = down, o[1], keys
    head_norm = None if q_norm is None else (head_dim,)
    found = qkv, o, gate_up, values, *norms, tuple(decoder.final_norm.shape), q_norm, k_norm
    return found == ((mixed + 2 * kv_heads * head_dim, hidden), (hidden, mixed), (2 * inner, hidden), keys,
                     *[(hidden,)] * 3, head_norm, head_norm)


def _shapes(layer: tuple[torch.Tensor | None, ...]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if t is None else tuple(t.shape) for t in layer)


def plan_of(decoder: Decoder, rows: int) -> Any:
    """Make a `LayersPlan` of steps of so many rows, which allocates and copies to the device.

    Raises:
        ValueError: the kernel does not take these layers, or not for so many rows.
    """
    if not are_alike(decoder):
        raise ValueError("decoder: expected layers of equal shapes that go together")
    if decoder.final_norm.dtype != torch.bfloat16 or not decoder.final_norm.is_contiguous():
        raise ValueError("final_norm: expected a contiguous bfloat16 tensor")
    from hf_paged.kernels.hopper.decoder_layers.plan import LayersPlan, LayerTensors

    layers = [LayerTensors(*layer) for layer in decoder.layers]  # type: ignore[arg-type]
    return LayersPlan(layers, decoder.final_norm, decoder.eps, decoder.scale, rows)


def own_tensors(plan: Any) -> Sequence[torch.Tensor]:
    """Return the tensors that a plan has allocated: a graph of the launch keeps these alive, and no weight."""
    return [value for value in vars(plan).values() if type(value) is torch.Tensor and value is not plan.final_norm]
