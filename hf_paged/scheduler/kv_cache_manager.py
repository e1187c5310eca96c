"""Allocation of cache blocks to sequences: prefix hits, new blocks, publication, release."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from hf_paged.scheduler import block_pool
from hf_paged.scheduler.block_pool import ROOT_DIGEST, ROOT_PREFIX_ID, BlockPool, KVBlock
from hf_paged.scheduler.plan import SchedulerConfig
from hf_paged.scheduler.sequence import Sequence


class KVCacheManager:
    """Gives blocks to sequences and keeps the prefix cache.

    ``prefix_cache_queries`` and ``prefix_cache_hits`` count tokens, of first admissions only.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.enable_prefix_caching = config.enable_prefix_caching
        self.block_pool = BlockPool(config.num_blocks)
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[KVBlock], int]:
        """Return the longest run of cached full blocks from the start, and the number of tokens that need no computing.

        The last token is always computed, since its logits are needed: if every block is cached, the run has all blocks
        and the number is one less than their tokens.
        """
        if not self.enable_prefix_caching or not seq.read_cache:
            return [], 0
        num_tokens = seq.num_tokens
        hits: list[KVBlock] = []
        parent_id = ROOT_PREFIX_ID
        self._hash_leading(seq, 1)
        while len(hits) < len(seq.block_hashes):
            content, digest = seq.block_hashes[len(hits)]
            block = self.block_pool.lookup(digest, content, parent_id)
            if block is None:
                break
            hits.append(block)
            parent_id = block.prefix_id
            if len(hits) == len(seq.block_hashes):
                self._hash_leading(seq, 2 * len(hits))
        return hits, min(len(hits) * self.block_size, num_tokens - 1)

    def shortage(self, seq: Sequence, num_tokens: int, hits: Seq[KVBlock] = ()) -> int:
        """Return how many blocks are missing to hold num_tokens with these hits; 0 or less if the sequence fits."""
        wanted = self.num_blocks_for(num_tokens) - len(seq.block_table) - len(hits)
        # A hit in the free queue leaves the queue, so it cannot be allocated as a new block too.
        return wanted - (self.block_pool.num_free - sum(block.ref_count == 0 for block in hits))

    def allocate_slots(self, seq: Sequence, num_tokens: int, hits: Seq[KVBlock] = ()) -> list[int] | None:
        """Extend the block table by the hits and by new blocks until it holds num_tokens.

        Returns the ids of the new blocks, or None, without effect, if too few are free.
        """
        if num_tokens > self.max_model_len:
            raise ValueError(f"{num_tokens} tokens asked for, max_model_len is {self.max_model_len}")
        if self.shortage(seq, num_tokens, hits) > 0:
            return None
        self.block_pool.touch(hits)
        wanted = self.num_blocks_for(num_tokens) - len(seq.block_table) - len(hits)
        new = [block.block_id for block in self.block_pool.allocate(max(wanted, 0))]
        if hits:
            assert not seq.block_table
            seq.num_published = len(hits)
            seq.prefix_id = hits[-1].prefix_id
            seq.prefix_digest = seq.block_hashes[len(hits) - 1][1]
        seq.block_table += [block.block_id for block in hits]
        seq.block_table += new
        return new

    def count_hit(self, seq: Sequence, num_hit_tokens: int) -> None:
        """Record the hit tokens of a first admission in the sequence and in the statistics."""
        if self.enable_prefix_caching and seq.read_cache:
            seq.num_cached_tokens = num_hit_tokens
            self.prefix_cache_queries += seq.num_tokens
            self.prefix_cache_hits += num_hit_tokens

    def publish(self, seq: Sequence, tokens: np.ndarray, num_tokens: int) -> list[KVBlock]:
        """Put the sequence's full blocks among its first num_tokens tokens into the prefix cache.

        Args:
            tokens: int32, at least the first num_tokens token ids of the sequence.

        Returns:
            The blocks that this call published.
        """
        if not self.enable_prefix_caching or seq.is_mixed:
            return []
        size, pool = self.block_size, self.block_pool
        published = []
        for i in range(seq.num_published, num_tokens // size):
            content = tokens[i * size : (i + 1) * size].tobytes() + seq.block_key(i * size, (i + 1) * size)
            seq.prefix_digest = block_pool.hash_block(seq.prefix_digest, content)
            block = pool.blocks[seq.block_table[i]]
            seq.prefix_id = pool.publish(block, seq.prefix_digest, content, seq.prefix_id)
            seq.num_published = i + 1
            published.append(block)
        return published

    def free(self, seq: Sequence) -> None:
        """Release the sequence's blocks from last to first, so that its tail is evicted before its head."""
        blocks = self.block_pool.blocks
        self.block_pool.free([blocks[i] for i in reversed(seq.block_table)])
        seq.block_table = []
        seq.is_mixed = False  # what is recomputed is of one state of the model
        seq.num_published = 0
        seq.prefix_id = ROOT_PREFIX_ID
        seq.prefix_digest = ROOT_DIGEST

    def unpublish(self, seq: Sequence) -> None:
        self.block_pool.unpublish([self.block_pool.blocks[i] for i in seq.block_table])

    def has_older_hit(self, token_ids: Seq[int], block_key: bytes = b"") -> bool:
        """Return whether the first block of this prompt, with its `Sequence.block_key`, would hit an older generation
        if it were trusted."""
        if not self.enable_prefix_caching or len(token_ids) < self.block_size:
            return False
        content = np.asarray(token_ids[: self.block_size], dtype=np.int32).tobytes() + block_key
        digest = block_pool.hash_block(ROOT_DIGEST, content)
        return self.block_pool.has_untrusted(digest, content, ROOT_PREFIX_ID)

    def _hash_leading(self, seq: Sequence, num_blocks: int) -> None:
        """Hash the first full blocks of a waiting sequence, each block once, since tokens are only appended."""
        known = seq.block_hashes
        size = self.block_size
        first, last = len(known), min(num_blocks, seq.num_tokens // size)
        if first >= last:
            return
        raw = np.array(seq.ids_between(first * size, last * size), dtype=np.int32).tobytes()
        digest = known[-1][1] if known else ROOT_DIGEST
        for i in range(first, last):
            content = raw[(i - first) * size * 4 : (i - first + 1) * size * 4]
            content += seq.block_key(i * size, (i + 1) * size)
            digest = block_pool.hash_block(digest, content)
            known.append((content, digest))
