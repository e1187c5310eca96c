"""Cache blocks: reference counts, the queue of free blocks and the prefix cache's hash map.

A hash match alone is never trusted. Every distinct cached content (these tokens after that prefix, under that key) has
a ``prefix_id``; a block matches only if its content is equal byte for byte and its parent's ``prefix_id`` is that of
the block matched before it. A ``prefix_id`` is never used again, so blocks after an evicted one cannot be reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import xxhash

NULL_BLOCK_ID = 0
ROOT_PREFIX_ID = 0  # parent of every first block
ROOT_DIGEST = b""


def hash_block(parent_digest: bytes, content: bytes) -> bytes:
    """Return xxh64 of a full block's content, chained to the digest of the block before it."""
    return xxhash.xxh64_digest(parent_digest + content)


class KVBlock:
    """One cache block; without a ``digest`` it is not in the prefix cache and the fields below `digest` are invalid."""

    __slots__ = ("block_id", "content", "digest", "generation", "parent_id", "prefix_id", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None
        self.content = b""  # token ids as int32; `Sequence.block_key` follows them
        self.parent_id = ROOT_PREFIX_ID
        self.prefix_id = ROOT_PREFIX_ID
        self.generation = 0

    def __repr__(self) -> str:
        prefix_id = None if self.digest is None else self.prefix_id
        return f"KVBlock({self.block_id}, ref_count={self.ref_count}, prefix_id={prefix_id})"


class BlockPool:
    """All blocks of one cache; block 0 is the null block, which is neither allocated nor counted.

    Args:
        num_blocks: Total, the null block included; at least 2.

    Attributes:
        free_queue: The free blocks as keys; the first is reused next.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed, since block 0 is never used")
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.free_queue = OrderedDict.fromkeys(self.blocks[1:])
        self.cached: dict[bytes, dict[int, KVBlock]] = {}  # digest -> block id -> block
        self.generation = 0
        self.trusted_from = 0  # oldest generation that `lookup` may return
        self._kept_from = 0  # oldest generation that `drop_older` has not dropped
        # Rises by at least 1 per block that becomes free or cached, so a sequence's shortage falls by no more than it.
        self.num_gains = 0
        self._last_prefix_id = ROOT_PREFIX_ID

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def allocate(self, n: int) -> list[KVBlock]:
        """Take n blocks for new content and evict what they cached; raises ValueError, without effect, if too few."""
        if n > self.num_free:
            raise ValueError(f"{n} blocks asked for, {self.num_free} are free")
        taken = [self.free_queue.popitem(last=False)[0] for _ in range(n)]
        for block in taken:
            if block.digest is not None:
                self._forget(block)
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Add one user to each block; a free block leaves the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                del self.free_queue[block]
            block.ref_count += 1

    def free(self, blocks: Iterable[KVBlock]) -> None:
        """Remove one user from each block, in this order; blocks without a hash are reused before cached ones."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} is freed but nobody uses it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.num_gains += 1
                self._queue(block)

    def publish(self, block: KVBlock, digest: bytes, content: bytes, parent_id: int) -> int:
        """Make a full block findable and return its prefix_id; blocks of equal content have the same prefix_id."""
        assert block.ref_count > 0, f"{block} is free"
        assert block.digest is None, f"{block} is published already"
        twin = self.lookup(digest, content, parent_id)
        if twin is not None:
            block.prefix_id = twin.prefix_id
        else:
            self._last_prefix_id += 1
            block.prefix_id = self._last_prefix_id
        block.digest, block.content, block.parent_id = digest, content, parent_id
        block.generation = self.generation
        self.num_gains += 1
        self.cached.setdefault(digest, {})[block.block_id] = block
        return block.prefix_id

    def lookup(self, digest: bytes, content: bytes, parent_id: int) -> KVBlock | None:
        """Return the cached block with this content after that prefix, or None."""
        for block in self.cached.get(digest, {}).values():
            if block.content == content and block.parent_id == parent_id and block.generation >= self.trusted_from:
                return block
        return None

    def unpublish(self, blocks: Iterable[KVBlock]) -> None:
        """Remove blocks from the prefix cache without freeing them; ignores blocks that are not cached."""
        for block in blocks:
            if block.digest is None:
                continue
            self._forget(block)
            if block.ref_count == 0:
                self.free_queue.move_to_end(block, last=False)

    def new_generation(self) -> None:
        """Start a generation: `lookup` ignores all blocks published before, until `trust_older`."""
        self.generation += 1
        self.trusted_from = self.generation

    def trust_older(self) -> None:
        """Let `lookup` return blocks of all older generations again, until the next `new_generation`."""
        self.trusted_from = 0
        self.num_gains += self.num_blocks

    def drop_older(self) -> None:
        """Remove every block of an older generation from the prefix cache; users keep their blocks."""
        self._kept_from = self.generation
        self.unpublish([block for block in self.blocks if block.generation < self.generation])

    def is_trusted(self, generation: int) -> bool:
        """Return whether what was computed in this generation may be used."""
        return generation >= max(self.trusted_from, self._kept_from)

    def has_untrusted(self, digest: bytes, content: bytes, parent_id: int) -> bool:
        """Return whether `lookup` would find a block of an older generation if `trust_older` had been called."""
        return any(
            block.content == content and block.parent_id == parent_id and block.generation < self.trusted_from
            for block in self.cached.get(digest, {}).values()
        )

    def reset(self) -> bool:
        """Empty the prefix cache; returns False, without effect, while a block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        for block in self.blocks:
            block.digest = None
            block.content = b""
        self.cached.clear()
        return True

    def grow(self, num_blocks: int) -> None:
        """Add free blocks up to this total; a smaller total changes nothing."""
        added = [KVBlock(i) for i in range(self.num_blocks, num_blocks)]
        self.blocks += added
        self.num_gains += len(added)
        for block in reversed(added):
            self._queue(block)

    def _queue(self, block: KVBlock) -> None:
        self.free_queue[block] = None
        if block.digest is None:
            self.free_queue.move_to_end(block, last=False)

    def _forget(self, block: KVBlock) -> None:
        assert block.digest is not None
        same = self.cached[block.digest]
        del same[block.block_id]
        if not same:
            del self.cached[block.digest]
        block.digest = None
        block.content = b""


def block_columns(pool: BlockPool) -> tuple[np.ndarray, np.ndarray]:
    """Return each block's number of users [N] int32 and whether it is cached [N] bool, the null block included.

    Takes some milliseconds for 100,000 blocks.
    """
    blocks = pool.blocks
    users = np.fromiter((block.ref_count for block in blocks), np.int32, len(blocks))
    cached = np.fromiter((block.digest is not None for block in blocks), bool, len(blocks))
    return users, cached
