"""A decode step as one CUDA graph: token ids, layers, final norm, head, sampling, state advance.

Captured lazily, per padded number of rows, all in one memory pool. Padding rows have length 0 and a slot of their own.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.integration.models import ModelAdapter
from hf_paged.kernels.metadata import PagedMetadata
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.request_state import RequestState, upload
from hf_paged.runner.sampler import sample
from hf_paged.runner.step_context import PagedStep


class Captured(NamedTuple):
    """A graph with its inputs and results: ``rows`` [2, size] int64 (slots, positions), ``tokens`` [size] int64."""

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    tokens: torch.Tensor


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Padded batch sizes: 1, 2, 4, 8, then steps of an eighth of the size, so that padding stays under 13 %."""
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, size // 8 // 8 * 8)
    return [s for s in sizes if s < max_num_seqs] + [max_num_seqs]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device, since cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it saw."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """Captures and replays decode steps. A graph is valid while nothing it points to has moved (see `check`)."""

    def __init__(self, adapter: ModelAdapter, kv_cache: KVCache, state: RequestState, max_model_len: int,
                 backend: str) -> None:  # fmt: skip
        self._adapter, self._cache, self._state = adapter, kv_cache, state
        self._max_model_len, self._backend = max_model_len, backend
        self._sizes = np.array(graph_sizes(state.num_slots))
        self._captured: dict[int, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(kv_cache.spec.device)
        self._model_signature: tuple | None = None
        self._held: list[torch.Tensor] = []  # what the graphs read stays allocated, whoever re-points a parameter
        self._memory_signature: tuple | None = None
        self.num_captured = 0
        self.num_dropped = 0
        self.largest = int(self._sizes[-1])

    def check(self) -> None:
        """Drop the graphs if the model's tensors moved or other adapters are active than when they were captured."""
        signature = self._signature()
        if signature != self._model_signature:
            self._drop()
        self._model_signature = signature
        self._held = [p.data for p in self._adapter.model.parameters()]

    def is_current(self) -> bool:
        """False once a parameter lies elsewhere, or another adapter is active, than at the last `check`."""
        return self._model_signature == self._signature()

    def _signature(self) -> tuple:
        return tuple(p.data_ptr() for p in self._adapter.model.parameters()), self._adapter.state_key()

    def launch(self, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Replay the step of R rows whose input tokens stand at `positions`; sampled tokens [R] on the device."""
        signature = (self._state.version, self._cache.version)
        if signature != self._memory_signature:
            self._drop()
            self._memory_signature = signature
        count = len(slots)
        size = int(self._sizes[np.searchsorted(self._sizes, count)])
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = self._capture(size)
        rows = np.empty((2, size), dtype=np.int64)
        rows[0], rows[1] = self._state.padding_slot, -1
        rows[0, :count], rows[1, :count] = slots, positions
        captured.rows.copy_(upload(rows, self._cache.spec.device))
        captured.graph.replay()
        return captured.tokens[:count]

    def _capture(self, size: int) -> Captured:
        """Run the step once on padding rows, which compiles what is missing, then record it."""
        device = self._cache.spec.device
        rows = torch.empty(2, size, dtype=torch.int64, device=device)
        rows[0], rows[1] = self._state.padding_slot, -1
        query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._run(rows, query_start)
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(): it collects garbage and empties the cache at every capture.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                tokens = self._run(rows, query_start)
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to see
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(self._stream)
        self.num_captured += 1
        return Captured(graph, rows, tokens)

    def _run(self, rows: torch.Tensor, query_start: torch.Tensor) -> torch.Tensor:
        state, (slots, positions) = self._state, rows
        at = positions.clamp(min=0)
        input_ids = state.tokens[slots, at].long()
        slot_mapping = torch.where(positions < 0, -1, state.slot_mapping(slots, at))
        size, seq_lens = len(slots), (positions + 1).to(torch.int32)
        meta = PagedMetadata(
            query_start=query_start, seq_lens=seq_lens, block_table=state.block_table,
            slots=slots.to(torch.int32), slot_mapping=slot_mapping, max_query_len=1, max_seq_len=self._max_model_len,
        )  # fmt: skip
        step = PagedStep(at, slot_mapping, self._cache, [(0, size, meta)], self._backend)
        logits = self._adapter.logits(self._adapter.hidden_states(input_ids, step))
        # The sampled token's place is the length of what it follows.
        return sample(logits, state.sampling, slots, seq_lens, state.tokens)

    def _drop(self) -> None:
        self.num_dropped += len(self._captured)
        self._captured.clear()
        # A memory pool dies with its last graph.
        self._pool = torch.cuda.graph_pool_handle()
