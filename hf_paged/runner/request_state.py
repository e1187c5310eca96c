"""State of every running sequence on the device: one line per slot in persistent tensors.

The host sends a sequence once, when it gets its slot, and afterwards only new block-table entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.kernels.step_inputs import StepInputs, step_inputs
from hf_paged.models.images.axis_offsets import AxisOffsets
from hf_paged.models.tuners import BASE
from hf_paged.runner.sharded_sampling import ShardedSampling
from hf_paged.sampling.edits import EditState, sample_edited
from hf_paged.sampling.log_probs import (
    FILTERS,
    NO_LOG_PROBS,
    PROCESSED,
    RAW,
    TOPS,
    token_log_probs,
    top_log_probs,
    top_processed,
    with_eos_barred,
)
from hf_paged.sampling.sampler import SamplingRows, sample
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.sampling.table import NUM_FLOATS, NUM_INTS, SamplingTable
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens

# Bytes of token history that are allocated at once. It moves later only where sequences of that length are rare: with
# 256 slots, beyond 261,000 tokens.
_HISTORY_BYTES = 256 << 20
# Rows of tables begin at multiples of this many entries, so that all models' kernels read them with the same alignment.
_ALIGNED = 16
# Stop tokens of a request that never move a table. Models have up to three.
_FIRST_STOP_TOKENS = 8
_MOST_STAGE_SETS = 6
_MOST_PADDED = 1 << 20  # entries, 4 MiB

Rows = Seq[list[int] | np.ndarray]  # token or block ids


class RequestState:
    """Persistent tensors of S slots: token history, block table, sampling parameters.

    ``tokens`` [S + 1, capacity] int32 holds ``max_model_len`` tokens, or up to `_HISTORY_BYTES` and grows by doubling;
    ``block_table`` [S + 1, max_blocks] int32; both padded to a multiple of 16. The last line, `padding_slot`, belongs
    to padding rows of CUDA graphs. ``sharded``: set if logits are the columns of one rank. ``moves``: how often what
    graphs read has moved, by the name of what moved.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device,
                 sharded: ShardedSampling | None = None) -> None:
        self.device = device
        self.sharded = sharded
        self.max_model_len = max_model_len
        self.num_slots = self.padding_slot = num_slots
        self.block_size = block_size
        self._longest = 0  # tokens of a sequence that was admitted
        self.moves = Counter({"slots": 0, "token history": 0, "stop tokens": 0})
        lines = num_slots + 1
        capacity = min(max_model_len, _HISTORY_BYTES // torch.int32.itemsize // lines)
        self.tokens = torch.zeros(lines, aligned(capacity), dtype=torch.int32, device=device)
        columns = table_columns(max_model_len, block_size)
        self.block_table = torch.zeros(lines, columns, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(
            floats=torch.zeros(lines, NUM_FLOATS, dtype=torch.float32, device=device),
            ints=torch.zeros(lines, NUM_INTS, dtype=torch.int64, device=device),
            eos=torch.full((lines, _FIRST_STOP_TOKENS), -1, dtype=torch.int64, device=device),
        )
        self.edits = EditState(num_slots, device)
        self.adapters = AdapterSlots(num_slots, device)
        self.axis_offsets = AxisOffsets(num_slots, device)
        self._stages = np.zeros(lines, dtype=np.int64)  # per slot, bits of the names in `_stage_names` that it needs
        self._stage_names: list[str] = []
        self._stage_sets: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Return the bytes of token history and block tables."""
        return self.tokens.nbytes + self.block_table.nbytes

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; graphs must be captured again."""
        more = num_slots - self.num_slots
        table = self.sampling
        capacity = max(self._longest, _HISTORY_BYTES // torch.int32.itemsize // (num_slots + 1))
        history = self.tokens[:, : aligned(capacity)]  # all of it moves, so it can become narrower
        tokens, blocks, floats, ints = (
            _with_lines(tensor, more) for tensor in (history, self.block_table, table.floats, table.ints)
        )
        sampling = SamplingTable(floats=floats, ints=ints, eos=_with_lines(table.eos, more, fill=-1))
        stages = np.pad(self._stages, (0, more))
        self.moves["slots"] += 1  # before anything moves, since an interrupt may come in between
        self.edits.grow(num_slots)
        self.adapters.grow(num_slots)
        self.axis_offsets.grow(num_slots)
        self.tokens, self.block_table, self.sampling, self._stages = tokens, blocks, sampling, stages
        self.num_slots = self.padding_slot = num_slots

    def admit(self, slots: list[int], tokens: Rows, tables: Rows, rows: list[SlotRow],
              fed: Seq[object] = ()) -> None:
        """Write known tokens, block tables and settings of sequences that got a slot, and of what prompts are fed."""
        self._longest = max(self._longest, *(row.max_length for row in rows))
        self._reserve_tokens(self._longest)
        index = self._upload(np.array(slots, dtype=np.int64))
        self._write_rows(self.tokens, index, tokens)
        self._write_rows(self.block_table, index, tables)
        self.sampling.floats[index] = self._upload(np.stack([row.floats for row in rows]))
        self.sampling.ints[index] = self._upload(np.stack([row.ints for row in rows]))
        self._reserve_eos(max(len(row.eos) for row in rows))
        eos = np.full((len(slots), self.sampling.eos.shape[1]), -1, dtype=np.int64)
        for line, row in zip(eos, rows, strict=True):
            line[: len(row.eos)] = row.eos
        self.sampling.eos[index] = self._upload(eos)
        self._admit_edits(np.array(slots, dtype=np.int64), rows)
        self.adapters.admit(slots, [row.adapter for row in rows])
        self.axis_offsets.admit(slots, fed)

    def stages(self, slots: np.ndarray) -> frozenset[str]:
        """Return the union of the logits-editing stages that the requests in these slots need.

        Each set of stages has its own graphs, so after some sets a new one becomes all stages ever needed: a stage does
        not change rows that do not need it.
        """
        bits = int(np.bitwise_or.reduce(self._stages[slots], initial=0))
        if bits and bits not in self._stage_sets:
            if len(self._stage_sets) >= _MOST_STAGE_SETS:
                bits = (1 << len(self._stage_names)) - 1
            self._stage_sets.add(bits)
        return frozenset(name for i, name in enumerate(self._stage_names) if bits >> i & 1) if bits else frozenset()

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
               stages: frozenset[str], logprobs: Mapping[str, torch.Tensor] = NO_LOG_PROBS,
               masks: TokenMasks | None = None) -> torch.Tensor:
        """Sample tokens int64 [R] for `positions` [R] of `slots` [R] and write them to `tokens` (see `sample_tokens`).

        ``logprobs``: {one of `LOGPROBS`: [R] float32} receive the tokens' log-probabilities, {one of `TOPS`:
        [R, 2, width] float32} what `Top` says of the likeliest tokens. ``masks`` of the R rows may be applied to
        ``logits`` in place.
        """
        if self.sharded is None:
            return self._sample_whole(logits, slots, positions, logprobs, masks, stages=stages)
        if not stages and not logprobs and self.sharded.can_agree(logits):
            return self.sharded.agree(logits, self.sampling, slots, positions, self.tokens, masks)
        draw = partial(self._sample_whole, stages=stages)
        return self.sharded.deal(logits, slots, positions, self.padding_slot, self.tokens, draw, logprobs, masks)

    def _sample_whole(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
                      logprobs: Mapping[str, torch.Tensor], masks: TokenMasks | None = None, *,
                      stages: frozenset[str]) -> torch.Tensor:
        settings, processed = (self.sampling, slots, positions, self.tokens), logprobs.get(PROCESSED)
        tops = {name: out for name, out in logprobs.items() if name in TOPS} if logprobs else NO_LOG_PROBS
        if stages - {FILTERS}:
            tokens = sample_edited(logits, self.sampling, self.edits, *settings[1:], stages, processed, tops, masks)
        else:
            drawn = logits
            if masks is not None:
                drawn = mask_tokens(logits.clone() if RAW in logprobs else logits, masks)
            tokens = sample(drawn, *settings, processed)
            if tops and any(TOPS[name].kind == PROCESSED for name in tops):
                rows = SamplingRows.of(self.sampling, slots, positions)
                top_processed(with_eos_barred(drawn, rows), rows, stages, tops)
        if RAW in logprobs:
            token_log_probs(logits, tokens, logprobs[RAW])
        for name, out in tops.items():
            if TOPS[name].kind == RAW:
                top_log_probs(logits, out)
        return tokens

    def set_tables(self, slots: list[int], tables: Rows) -> None:
        """Write whole block tables."""
        self._write_rows(self.block_table, self._upload(np.array(slots, dtype=np.int64)), tables)

    def set_tokens(self, slots: torch.Tensor, start: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write ``tokens`` [rows, n] to the history of ``slots`` [rows] from ``start`` [rows] on, both int64."""
        if tokens.shape[1] == 1:
            self.tokens[slots, start] = tokens[:, 0].to(self.tokens.dtype)
            return
        columns = start[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.tokens[slots[:, None], columns] = tokens.to(self.tokens.dtype)

    def update_blocks(self, slots: np.ndarray, columns: np.ndarray, block_ids: np.ndarray) -> None:
        """Write new block-table entries of running sequences."""
        if len(slots):
            packed = self._upload(np.stack([slots, columns, block_ids]).astype(np.int64))
            self.block_table[packed[0], packed[1]] = packed[2].to(torch.int32)

    def inputs(self, slots: torch.Tensor, positions: torch.Tensor,
               write_from: torch.Tensor | None = None) -> StepInputs:
        """Return the inputs of the tokens at ``positions`` [T] of ``slots`` [T] (see `step_inputs`)."""
        return step_inputs(self.tokens, self.block_table, slots, positions, write_from, self.block_size)

    def _reserve_tokens(self, length: int) -> None:
        capacity = self.tokens.shape[1]
        if length > capacity:
            capacity = aligned(min(max(2 * capacity, length), self.max_model_len))
            self.moves["token history"] += 1
            grown = torch.zeros(len(self.tokens), capacity, dtype=torch.int32, device=self.device)
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown

    def _admit_edits(self, slots: np.ndarray, rows: list[SlotRow]) -> None:
        for slot, row in zip(slots, rows, strict=True):
            names = row.stages
            if (self.sharded is not None or row.with_top) and row.is_filtered:
                names |= {FILTERS}
            self._stage_names += sorted(names - set(self._stage_names))
            self._stages[slot] = sum(1 << self._stage_names.index(name) for name in names)
        # Also resets a slot whose previous sequence had edits.
        if self._stages[slots].any() or self.edits.in_use:
            self.edits.put(slots, rows)

    def _reserve_eos(self, width: int) -> None:
        capacity = self.sampling.eos.shape[1]
        if width > capacity:
            grow = max(2 * capacity, width) - capacity
            self.moves["stop tokens"] += 1
            self.sampling = self.sampling._replace(
                eos=torch.nn.functional.pad(self.sampling.eos, (0, grow), value=-1)
            )

    def _write_rows(self, table: torch.Tensor, index: torch.Tensor, rows: Rows) -> None:
        """Write rows of any lengths to the lines ``index`` [R] of a table; entries after a row's end are arbitrary."""
        groups = _padded_together(rows)
        for group in groups:
            lines = index if len(groups) == 1 else index[self._upload(np.array(group))]
            padded = _pad([rows[i] for i in group])
            table[lines, : padded.shape[1]] = self._upload(padded)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.device)


def table_columns(max_model_len: int, block_size: int) -> int:
    """Return the columns of `RequestState.block_table`."""
    return aligned(-(-max_model_len // block_size))


def aligned(columns: int) -> int:
    """Return the columns of a table that has at least so many."""
    return -(-columns // _ALIGNED) * _ALIGNED


def _with_lines(table: torch.Tensor, more: int, fill: int = 0) -> torch.Tensor:
    """Return a copy of ``table`` [lines, n] with more lines; the last line, for padding rows, is a new one."""
    return torch.nn.functional.pad(table, (0, 0, 0, more), value=fill)


def _padded_together(rows: Rows) -> list[list[int]]:
    """Group rows into uploads: one for all, unless padding to a few long rows would make it much larger."""
    if len(rows) * max(map(len, rows)) <= _MOST_PADDED:
        return [list(range(len(rows)))]
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(len(row).bit_length(), []).append(i)  # lengths in a group differ by less than 2 times
    return list(groups.values())


def _pad(rows: Rows) -> np.ndarray:
    padded = np.zeros((len(rows), max(len(r) for r in rows)), dtype=np.int32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


class AdapterSlots:
    """Index into the executor's adapters per slot (see `StepContext.adapters`), [S + 1] int32 on the device.

    0 stands for the model's active adapters, -1 for the base model. While no sequence names an adapter, no slot is
    stored and nothing is sent to the device.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._index = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._is_named = np.zeros(num_slots + 1, dtype=bool)
        self._names: dict[int, str] = {}  # by slot; includes ended sequences
        self._entries: dict[str, int] = {BASE: -1}

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; graphs must be captured again."""
        more = num_slots + 1 - len(self._index)
        index, is_named = torch.nn.functional.pad(self._index, (0, more)), np.pad(self._is_named, (0, more))
        self._index, self._is_named = index, is_named

    @property
    def num_names(self) -> int:
        """Return the number of adapters that rows can name."""
        return len(self._entries) - 1

    def use_entries(self, names: tuple[str, ...]) -> None:
        """Use a new order of the executor's adapters and update the indices of all slots by name."""
        entries = {BASE: -1} | {name: entry for entry, name in enumerate(names, 1)}
        if entries != self._entries:
            self._entries = entries
            # A slot whose adapter was deleted belongs to an ended sequence.
            self._names = {slot: name for slot, name in self._names.items() if name in entries}
            self._send(list(self._names))

    def admit(self, slots: list[int], names: list[str | None]) -> None:
        """Set the adapters of sequences that got these slots; None stands for the model's active adapters."""
        if not self._names and not any(names):
            return
        for slot, name in zip(slots, names, strict=True):
            self._is_named[slot] = name is not None
            if name is None:
                self._names.pop(slot, None)
            else:
                self._names[slot] = name
        self._send(slots)

    def any_named(self, slots: np.ndarray) -> bool:
        """Return whether one of these sequences names an adapter."""
        return bool(self._names) and bool(self._is_named[slots].any())

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the adapter index of each slot: ``slots`` [T] int64 on the device -> [T] int32."""
        return self._index[slots]

    def _send(self, slots: list[int]) -> None:
        if slots:
            entries = [self._entries[self._names[slot]] if slot in self._names else 0 for slot in slots]
            index, values = upload(np.array([slots, entries], dtype=np.int64), self._device)
            self._index[index] = values.to(torch.int32)
