"""What the kernel for all layers is compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PROGRAMS = 128  # each of which has a multiprocessor to itself, since they wait for each other
HEAD_DIM = 128
LINE = 64  # values of a line of shared memory, the widest that TMA swizzles: 128 bytes
PAGE_POSITIONS = 16  # that one TMA copy brings
FAR_BITS = 37  # TMA counts lines and slots in int32, so what lies further off has another coordinate: of 128 GiB each
ROWS = (1, 2, 4, 8)  # of a step, one new token each
_MOST_TOGETHER = 6  # chunks for which a product waits at the same time
SHARED_BYTES = 227 << 10
_OTHER_BYTES, _OTHER_ROW_BYTES = 14 << 10, 2 << 10  # of shared memory besides chunks, x and residual


class LayerFields(NamedTuple):
    """Columns of the table of layers, int64: places from the lowest tensor of its kind on, or addresses."""

    qkv: int  # line, as of the other weights
    o: int
    gate_up: int
    down: int
    keys: int  # slot
    values: int
    input_norm: int  # address
    post_norm: int
    q_norm: int
    k_norm: int
    k_cache: int
    v_cache: int


def kinds(layers: Sequence[Any]) -> Iterator[tuple[str, list[Any], int]]:
    """Yield name, tensors and bytes of a unit for tensors of layers (`LayerTensors`) that are addressed relative to the
    lowest one of them. They may lie terabytes apart: CUDA allocates addresses from both ends of its range."""
    for i, name in enumerate(("qkv", "o", "gate_up", "down")):
        yield name, [layer[i] for layer in layers], 2 * LINE
    caches = [cache for layer in layers for cache in layer[4:6]]
    yield "caches", caches, 2 * caches[0].shape[2] * HEAD_DIM


def chunks_together(rows: int, paired: bool) -> int:
    """How many chunks of eight of a program's rows of a weight have their products taken side by side."""
    chunks = -(-rows // 8)
    return max(n for n in range(1, 4 if paired else 5) if chunks % n == 0)


@dataclass(frozen=True)
class LayersShape:
    """Sizes of a model, and how its weights come to shared memory: in chunks of eight rows of a weight."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    block_size: int
    has_head_norms: bool
    rows: int  # of a step, a power of two

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def splits(self) -> int:
        """Programs that share a row's positions of a KV head."""
        return PROGRAMS // (self.kv_heads * self.rows)

    @property
    def columns(self) -> int:
        """Of a chunk."""
        return 512 if (self.hidden | self.inner | self.mixed) % 1024 else 1024

    @property
    def lines(self) -> int:
        """Of a chunk's row."""
        return self.columns // LINE

    @property
    def positions(self) -> int:
        """Of a chunk of keys or values."""
        return self.columns * 8 // HEAD_DIM

    @property
    def qkv(self) -> int:
        """Width of the merged projection of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def mixed(self) -> int:
        """Width of what attention makes."""
        return self.heads * HEAD_DIM

    @property
    def widest(self) -> int:
        """The widest input of a product."""
        return max(self.hidden, self.mixed, self.inner)

    @property
    def stages(self) -> int:
        """Chunks for which shared memory has room."""
        others = 2 * self.rows * (self.widest + self.hidden) + _OTHER_BYTES + _OTHER_ROW_BYTES * self.rows
        return (SHARED_BYTES - others) // (16 * self.columns)

    @property
    def depth(self) -> int:
        """Chunks of weights that are on their way at the same time."""
        # Measured, see docs/notebook.md. Half as large chunks are twice as many.
        if self.columns < 1024:
            return 4
        return 1 if self.rows > 2 and self.hidden <= 1024 else 2

    @property
    def kv_depth(self) -> int:
        """Chunks of keys and values that are."""
        return 3 if self.rows > 2 else 1 if self.columns == 1024 else 4

    @property
    def has_room(self) -> bool:
        """Do so many rows fit programs and shared memory?"""
        return (self.rows in ROWS and self.kv_heads * self.rows <= PROGRAMS
                and self.stages >= _MOST_TOGETHER)
