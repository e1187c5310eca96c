# mypy: disallow-untyped-defs=False
"""A 64-bit checksum over all bytes of a model's tensors, to notice any weight change, however it was made."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import attrgetter

import numpy as np
import torch
import xxhash

from hf_paged.device.cuda import upload
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton
from hf_paged.kernels.build import compiling
from hf_paged.kernels.build.compiling import in_background
from hf_paged.process_lock import once_a_process

# Bytes a program reads: some hundred thousand programs for an 8B model, each with eight tiles of work.
CHUNK_BYTES = 1 << 16
TILE_WORDS = 1024
_device, _nbytes = attrgetter("device"), attrgetter("nbytes")


class ChecksumPlan:
    """Position-dependent checksum of every byte of some tensors, which all lie on one device.

    It keeps the pointer table of its last call while addresses and sizes stay. The value depends on contents, sizes and
    order, not on addresses or strides; it is comparable with others from the same device type only.
    """

    def __init__(self) -> None:
        self._signature: tuple[list[int], list[int]] = [], []
        self._chunks: torch.Tensor | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The checksum.

        Args:
            tensors: any dtypes, sizes and alignments; a non-contiguous one is copied first.

        Returns:
            ``[1]`` int64 on the tensors' device (CPU for no tensors), enqueued without waiting for it.

        Raises:
            ValueError: tensors on more than one device.
        """
        devices = set(map(_device, tensors))
        if len(devices) > 1:
            raise ValueError(f"tensors must share one device, got {sorted(map(str, devices))}")
        if not devices or devices == {torch.device("cpu")}:
            return weights_checksum_reference(tensors)
        if not all(map(torch.Tensor.is_contiguous, tensors)):
            tensors = [t.detach().contiguous() for t in tensors]
        return self.launch(tensors)

    def launch(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The Triton kernel over contiguous tensors of one device; its value differs from the reference's."""
        require_triton()
        device = tensors[0].device
        # Column by column: rows of a few hundred tensors take longer to make than to launch a kernel over.
        signature = list(map(torch.Tensor.data_ptr, tensors)), list(map(_nbytes, tensors))
        if self._chunks is None or self._chunks.device != device or self._signature != signature:
            self._chunks = upload(_chunk_table(*signature), device)
            self._signature = signature
        out = torch.zeros(1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            wait([_warmed_up(device.index)])  # it may be under way
        if len(self._chunks):
            with on_device_of(out):
                _checksum_kernel[(len(self._chunks),)](self._chunks, out, TILE=TILE_WORDS, num_warps=4)
        return out


def warm_up(device: torch.device) -> None:
    """Have the kernel compiled in a thread, behind what Triton does once in a process: calls need this kernel first."""
    if triton is not None and device.type == "cuda" and not triton.knobs.runtime.interpret:
        _warmed_up(torch.cuda.current_device() if device.index is None else device.index)


@once_a_process
def _warmed_up(device: int) -> Future[object]:
    return in_background(partial(_warm_up, device))


def _warm_up(device: int) -> None:
    wait([compiling.prepare_triton()])
    with torch.cuda.device(device):
        kernel = _checksum_kernel.warmup(torch.int64, torch.int64, TILE=TILE_WORDS, num_warps=4, grid=(1,))
        compiling.with_launcher(kernel)


def weights_checksum_reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksum of CPU tensors: xxh3 over sizes and bytes, a value unlike the GPU's."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        dense = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        digest.update(dense.nbytes.to_bytes(8, "little"))
        if dense.data_ptr():  # a storage that was resized to 0 has no memory
            # Not `numpy()`, after which the tensor's storage could not be resized any more.
            digest.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))
    return torch.from_numpy(np.array([digest.intdigest()], dtype=np.uint64).view(np.int64))


def _chunk_table(addresses: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """``[chunks, 3]`` int64: address, bytes, and index of the first 8-byte word among all tensors' words."""
    address, nbytes = np.array(addresses, dtype=np.int64), np.array(sizes, dtype=np.int64)
    words = -(-nbytes // 8)
    first_word = np.cumsum(words) - words
    chunks = -(-nbytes // CHUNK_BYTES)
    tensor = np.repeat(np.arange(len(nbytes)), chunks)
    offset = (np.arange(len(tensor)) - (np.cumsum(chunks) - chunks)[tensor]) * CHUNK_BYTES
    size = np.minimum(nbytes[tensor] - offset, CHUNK_BYTES)
    return np.stack([address[tensor] + offset, size, first_word[tensor] + offset // 8], axis=1)


@jit()
def _mix(word):
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection, so that one changed word always shows."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@jit()
def _checksum_kernel(chunks, out, TILE: tl.constexpr):
    """Adds up mix(word + (index + 1) * golden) modulo 2**64; a chunk's last word is padded with zero bytes."""
    entry = chunks + tl.program_id(0).to(tl.int64) * 3
    address = tl.load(entry)
    nbytes = tl.load(entry + 1)
    first_word = tl.load(entry + 2).to(tl.uint64)
    lane = tl.arange(0, TILE)
    lane_key = (lane + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    total = tl.zeros([TILE], tl.uint64)

    # Whole tiles at an aligned address are read 16 bytes a thread; the rest, and odd addresses, byte by byte.
    wide = tl.where(address % 16 == 0, nbytes // (8 * TILE) * TILE, 0)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    for start in range(0, wide, TILE):
        word = tl.load(words + start + lane)
        total += _mix(word + lane_key + (first_word + start) * 0x9E3779B97F4A7C15)
    data = address.to(tl.pointer_type(tl.uint8))
    for start in range(wide, (nbytes + 7) // 8, TILE):
        index = start + lane
        word = tl.zeros([TILE], tl.uint64)
        for byte in tl.static_range(8):
            at = index * 8 + byte
            word |= tl.load(data + at, mask=at < nbytes, other=0).to(tl.uint64) << (8 * byte)
        mixed = _mix(word + lane_key + (first_word + start) * 0x9E3779B97F4A7C15)
        total += tl.where(index * 8 < nbytes, mixed, tl.zeros([TILE], tl.uint64))
    tl.atomic_add(out, tl.sum(total.to(tl.int64), 0))
