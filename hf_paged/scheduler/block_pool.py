"""Cache blocks: reference counts, the queue of free blocks and the prefix cache's hash map.

A hash match alone is never trusted. Every distinct cached content (these tokens after that prefix, under that key) has
a ``prefix_id``; a block matches only if its content is equal byte for byte and its parent's ``prefix_id`` is that of
the block matched before it. A ``prefix_id`` is never used again, so blocks after an evicted one cannot be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

NULL_BLOCK_ID = 0
ROOT_PREFIX_ID = 0  # parent of every first block
ROOT_DIGEST = b""


def hash_block(parent_digest: bytes, content: bytes) -> bytes:
    """Return xxh64 of a full block's content, chained to the digest of the block before it."""
    return xxhash.xxh64_digest(parent_digest + content)


class KVBlock:
    """One cache block; without a ``digest`` it is not in the prefix cache and the fields below `digest` are invalid."""

    __slots__ = ("block_id", "content", "digest", "generation", "next", "parent_id", "prefix_id", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None
        self.content = b""  # token ids as int32; a first block's cache key follows them
        self.parent_id = ROOT_PREFIX_ID
        self.prefix_id = ROOT_PREFIX_ID
        self.generation = 0
        self.prev: KVBlock | None = None  # links of the free queue
        self.next: KVBlock | None = None

    def __repr__(self) -> str:
        prefix_id = None if self.digest is None else self.prefix_id
        return f"KVBlock({self.block_id}, ref_count={self.ref_count}, prefix_id={prefix_id})"


class FreeQueue:
    """Doubly linked queue of free blocks: `popleft` takes the front, `remove` takes any block in O(1)."""

    def __init__(self, blocks: Iterable[KVBlock] = ()) -> None:
        self._ends = KVBlock(-1)  # sentinel: `next` is the front, `prev` the back
        self._ends.prev = self._ends.next = self._ends
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._ends.next
        while block is not self._ends:
            assert block is not None
            yield block
            block = block.next

    def _insert(self, block: KVBlock, after: KVBlock) -> None:
        before = after.next
        assert before is not None
        assert block.next is None, f"{block} is queued already"
        block.prev, block.next = after, before
        after.next = before.prev = block
        self._len += 1

    def append(self, block: KVBlock) -> None:
        """Add a block at the back, to be reused last."""
        assert self._ends.prev is not None
        self._insert(block, self._ends.prev)

    def appendleft(self, block: KVBlock) -> None:
        """Add a block at the front, to be reused next."""
        self._insert(block, self._ends)

    def remove(self, block: KVBlock) -> None:
        before, after = block.prev, block.next
        assert before is not None, f"{block} is not queued"
        assert after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._len -= 1

    def popleft(self) -> KVBlock:
        """Remove and return the front block; raises IndexError if the queue is empty."""
        block = self._ends.next
        if block is self._ends or block is None:
            raise IndexError("no free block")
        self.remove(block)
        return block


class BlockPool:
    """All blocks of one cache; block 0 is the null block, which is neither allocated nor counted.

    Args:
        num_blocks: Total, the null block included; at least 2.
        enable_caching: If False, no block may be published.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed, since block 0 is never used")
        self.enable_caching = enable_caching
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.free_queue = FreeQueue(self.blocks[1:])
        self.cached: dict[bytes, dict[int, KVBlock]] = {}  # digest -> block id -> block
        self.generation = 0
        self.trusted_from = 0  # oldest generation that `lookup` may return
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
        taken = [self.free_queue.popleft() for _ in range(n)]
        for block in taken:
            if block.digest is not None:
                self._forget(block)
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Add one user to each block; a free block leaves the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_queue.remove(block)
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
        assert self.enable_caching
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
                self.free_queue.remove(block)
                self._queue(block)

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
        self.unpublish([block for block in self.blocks if block.generation < self.generation])

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
            self.free_queue.appendleft(block)

    def _queue(self, block: KVBlock) -> None:
        if block.digest is None:
            self.free_queue.appendleft(block)
        else:
            self.free_queue.append(block)

    def _forget(self, block: KVBlock) -> None:
        assert block.digest is not None
        same = self.cached[block.digest]
        del same[block.block_id]
        if not same:
            del self.cached[block.digest]
        block.digest = None
        block.content = b""
