"""Which thread has which element of a matrix, by PTX's manual: ``mma``, ``wgmma``, ``ldmatrix``, ``stmatrix``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arithmetic import OF_BITS, UNSIGNED, pairs
from .memory import SharedMemory
from .ptx import BYTES, Fault

Array = np.ndarray[Any, Any]


def left(registers: list[Array], kind: str, depth: int, lanes: Array) -> Array:
    """Return the left matrices [warps, 16, depth] of products, of two or four registers a thread."""
    made, warp = np.zeros((len(lanes) // 32, 16, depth), np.float32), np.arange(len(lanes)) // 32
    for i, bits in enumerate(registers):
        row, column = lanes // 4 + 8 * (i % 2), lanes % 4
        if BYTES[kind] == 4:
            made[warp, row, column + 4 * (i // 2)] = OF_BITS[kind](bits)
        else:
            for j, half in enumerate(pairs(bits).T):
                made[warp, row, 2 * column + j + 8 * (i // 2)] = OF_BITS[kind](half.copy())
    return made


def right(registers: list[Array], kind: str, depth: int, lanes: Array) -> Array:
    """Return the right matrices [warps, depth, 8]."""
    made, warp = np.zeros((len(lanes) // 32, depth, 8), np.float32), np.arange(len(lanes)) // 32
    for i, bits in enumerate(registers):
        if BYTES[kind] == 4:
            made[warp, lanes % 4 + 4 * i, lanes // 4] = OF_BITS[kind](bits)
        else:
            for j, half in enumerate(pairs(bits).T):
                made[warp, 2 * (lanes % 4) + j + 8 * i, lanes // 4] = OF_BITS[kind](half.copy())
    return made


def place_of_sum(register: int, lanes: Array) -> tuple[Array, Array]:
    """Return row and column, within its warp's 16 rows, of what each thread has in a register of a product."""
    return lanes // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lanes % 4) + register % 2


def tile_places(lanes: Array, is_transposed: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return rows and columns of the two elements that a thread has of an 8 x 8 matrix of `ldmatrix`."""
    outer, inner = lanes // 4, 2 * (lanes % 4)
    places = (outer, inner), (outer, inner + 1)
    return tuple((column, row) for row, column in places) if is_transposed else places  # type: ignore[return-value]


class Descriptor(NamedTuple):
    """A matrix in shared memory, as `wgmma` is told of it.

    Attributes:
        start: its address.
        leading, stride: bytes between its blocks of 8 rows or columns.
        line: bytes of the lines that are swizzled.
    """

    start: int
    leading: int
    stride: int
    line: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        if bits >> 49 & 7:
            raise NotImplementedError("descriptors with an offset of their base")
        return cls(*((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32)), {0: 16, 1: 128, 2: 64, 3: 32}[bits >> 62])

    def read(self, memory: SharedMemory, lines: int, depth: int, kind: str, is_transposed: bool) -> Array:
        """Return the matrix [lines, depth]; transposed: whose lines lie one beside the other."""
        size = BYTES[kind]
        i, k = np.arange(lines)[:, None], np.arange(depth)[None, :]
        if is_transposed:
            at = self.start + i * size % self.line + i * size // self.line * self.leading
            at = at + k % 8 * self.line + k // 8 * self.stride
        else:
            at = self.start + i % 8 * self.line + i // 8 * self.stride
            at = at + (k * size % 16 + k * size // 16 * self.leading if self.line == 16 else k * size)
        at = at ^ (at >> 7 & self.line // 16 - 1) << 4
        found = np.ascontiguousarray(memory.of_matrix(at, size)).view(UNSIGNED[size])[..., 0]
        return OF_BITS[kind](found)


def same_in_all(bits: Array) -> int:
    """Return a number that all threads have to have alike."""
    if (bits != bits[0]).any():
        raise Fault("threads of a product have other descriptors")
    return int(bits[0])
