"""Rows that step together on the engine while stock's decoding loop picks every token."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.engine.core import EngineCore
from hf_paged.kernels.upload import upload
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence
from hf_paged.scheduler.lockstep_rows import LockstepRows, OutOfBlocksError, RowMoves, too_many_rows


def refusal(core: EngineCore, prompts: list[list[int]], max_new_tokens: int) -> str | None:
    """Why these rows cannot step together now, or None. Nothing is in flight afterwards."""
    scheduler = core.make_room()
    return too_many_rows(scheduler, prompts, max_new_tokens, core.pool.max_blocks)


class LockstepBatch:
    """Paged forwards over rows that all go the same number of tokens a step.

    The engine holds its lock from before this is made until after `close`, so no other caller runs on the device.

    Args:
        core: with nothing in flight (`refusal` sees to that).
        prompts: R lists of token ids.
        max_new_tokens: tokens after the prompt that a row may reach.
        cache_salt: as in `RequestSettings`, of all rows.
    """

    def __init__(self, core: EngineCore, prompts: list[list[int]], max_new_tokens: int,
                 cache_salt: bytes = b"") -> None:
        self._core = core
        self._may_publish = True
        self._max_tokens = max(map(len, prompts)) + max_new_tokens
        with core.changing():
            scheduler = core.scheduler_or_build()
            arrivals = [Sequence("lockstep", prompt, max_new_tokens=1, cache_salt=cache_salt) for prompt in prompts]
            core.receive_rows(arrivals)
            self.rows = LockstepRows(scheduler, prompts, self._max_tokens, arrivals[0].cache_key)

    def prompts(self) -> torch.Tensor:
        """Compute the prompts: logits [R, V] after the last token of each, in the model's dtype."""
        with self._core.changing():
            runner = self._runner()
            settings = SlotParameters(max_length=self._max_tokens)
            logits = []
            for plan in self.rows.prompt_plans():
                logits.append(runner.logits(plan, [settings] * len(plan.admitted)))
                self._core.totals["steps"] += 1
                self._core.totals["prefill"] += plan.num_tokens
            self._core.trust_cache()
            result = torch.cat(logits)
            sources = self.rows.slots
            if (moves := self.rows.fork()) is not None:
                self._follow(moves, sources)
                result = result[upload(moves.parents, runner.device)]
            self._core.totals["generated"] += len(self.rows)
        return result

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute ``tokens`` [R, n] of every row: logits [R, n, V], valid until the next call.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory for the blocks.
            ValueError: more tokens than these rows were made for.
        """
        with self._core.changing():
            if self._core.model_changed():
                self._may_publish = False
            runner, (num_rows, num_new) = self._runner(), tokens.shape
            try:
                plan = self.rows.decode_plan(num_new)
            except OutOfBlocksError as error:
                raise torch.OutOfMemoryError(str(error)) from error
            runner.state.set_tokens(plan.slots, plan.start, tokens.to(runner.device))
            logits = runner.logits(plan, [], of_every_token=True)
            self._core.totals["steps"] += 1
            self._core.totals["generated"] += num_rows * num_new
        return logits.view(num_rows, num_new, -1)

    def reorder(self, parents: list[int]) -> None:
        """Row i goes on from what row ``parents[i]`` computed."""
        if parents == list(range(len(parents))):
            return
        with self._core.changing():
            self._follow(self.rows.reorder(parents), self.rows.slots)

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens of every row."""
        with self._core.changing():
            self.rows.crop(num_tokens)
            self._core.totals["generated"] -= num_tokens * len(self.rows)

    def keys_and_values(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of every layer's K and V [R, num_kv_heads, length, head_dim]; zeros before a row's first token."""
        runner, rows = self._runner(), self.rows
        size, positions = runner.block_size, np.full((len(rows), length), -1, np.int64)
        for line, seq, count in zip(positions, rows.sequences, rows.lengths.tolist(), strict=True):
            slots = np.array(seq.block_table)[:, None] * size + np.arange(size)
            line[length - count :] = slots.ravel()[:count]
        index = upload(positions, runner.device)
        empty = (index < 0)[:, :, None, None]

        def gather(pages: torch.Tensor) -> torch.Tensor:
            return pages.flatten(0, 1)[index.clamp(min=0)].masked_fill(empty, 0).transpose(1, 2).contiguous()

        return [(gather(keys), gather(values)) for keys, values in runner.cache.layers]

    def close(self) -> None:
        """Give everything back, and what was computed to the prefix cache. Nothing where the engine has to recover."""
        core = self._core
        if core.dirty:
            return
        with core.changing():
            if self._may_publish and len(self.rows) == len(self.rows.slots) and not core.weights_moved():
                state, longest = self._runner().state, int(self.rows.lengths.max())
                history = state.tokens[upload(self.rows.slots.astype(np.int64), state.device), :longest]
                self.rows.publish(history.cpu().numpy())
            self.rows.free()

    def _runner(self) -> ModelRunner:
        assert self._core.pool.runner is not None
        return self._core.pool.runner

    def _follow(self, moves: RowMoves, slots_before: np.ndarray) -> None:
        """Let the device's lines and blocks follow rows that moved."""
        runner, rows = self._runner(), self.rows
        if moves.sources:
            sources, targets = upload(np.array([moves.sources, moves.targets], np.int64), runner.device)
            runner.cache.copy_blocks(sources, targets)
        runner.state.move(rows.slots, slots_before[moves.parents])
        runner.state.set_tables(rows.slots.tolist(), [seq.block_table for seq in rows.sequences])
