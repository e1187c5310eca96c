"""State of every running sequence on the device: one line per slot in persistent tensors.

The host sends a sequence once, when it gets its slot, and afterwards only new block-table entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.upload import upload
from hf_paged.kernels.step_inputs import StepInputs, step_inputs
from hf_paged.runner.adapter_slots import AdapterSlots
from hf_paged.runner.sharded_sampling import ShardedSampling
from hf_paged.sampling.edit_lines import float_line, int_line
from hf_paged.sampling.edit_reference import NEUTRAL, Edits
from hf_paged.sampling.edits import EditLines, EditState, encode_edits, sample_edited
from hf_paged.sampling.sampler import SamplingRows, sample
from hf_paged.sampling.table import FLOAT_NAMES, INT_NAMES, NUM_FLOATS, NUM_INTS, Drawing, SamplingTable
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS, PROCESSED, RAW, token_log_probs
from hf_paged.sampling.token_mask import TokenMasks, mask_tokens
from hf_paged.sampling.top_log_probs import FILTERS, TOPS, top_log_probs, top_processed, with_eos_barred

FIRST_TOKEN_CAPACITY = 2048
_MOST_STAGE_SETS = 6
_MOST_PADDED = 1 << 20  # entries, 4 MiB

Rows = Seq[list[int] | np.ndarray]  # token or block ids


class SlotLines(NamedTuple):
    """`SlotParameters` of one request in the encoding of `RequestState`, which a step only copies."""

    floats: np.ndarray  # [NUM_FLOATS] float32
    ints: np.ndarray  # [NUM_INTS] int64
    eos: np.ndarray  # [N] int64
    edits: EditLines


@dataclass(frozen=True, kw_only=True)
class SlotParameters(Drawing):
    """Sampling settings of one request, as the device keeps them (see `SamplingTable`). Defaults: greedy search."""

    max_length: int
    seed: int = 0
    min_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # barred like EOS below min_length
    prompt_length: int = 0
    edits: Edits = NEUTRAL
    adapter: str | None = None
    with_top: bool = False  # the request wants the likeliest tokens

    @cached_property
    def lines(self) -> SlotLines:
        """Encode the settings; computed when the request arrives, so that an error reaches its caller.

        Raises:
            ValueError: With the name of a setting that the device's tables cannot hold.
        """
        floats = float_line(FLOAT_NAMES, self.floats())
        ints = int_line(INT_NAMES, self.ints(self.seed, self.min_length))
        eos = int_line("eos_token_id, stop_token_ids", (*self.eos_token_ids, *self.stop_token_ids))
        edits = encode_edits(self.edits, self.prompt_length, self.max_length, self.eos_token_ids)
        return SlotLines(floats, ints, eos, edits)


class RequestState:
    """Persistent tensors of S slots: token history, block table, sampling parameters.

    ``tokens`` [S + 1, capacity] int32 grows by doubling up to ``max_model_len``; ``block_table`` [S + 1, max_blocks]
    int32. The last line, `padding_slot`, belongs to padding rows of CUDA graphs. ``sharded``: set if logits are the
    columns of one rank.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device,
                 sharded: ShardedSampling | None = None) -> None:
        self.device = device
        self.sharded = sharded
        self.max_model_len = max_model_len
        self.num_slots = self.padding_slot = num_slots
        self.block_size = block_size
        self.version = 0  # number of moves of memory that graphs read
        lines = num_slots + 1
        max_blocks = -(-max_model_len // block_size)
        self.tokens = torch.zeros(lines, min(FIRST_TOKEN_CAPACITY, max_model_len), dtype=torch.int32, device=device)
        self.block_table = torch.zeros(lines, max_blocks, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(
            floats=torch.zeros(lines, NUM_FLOATS, dtype=torch.float32, device=device),
            ints=torch.zeros(lines, NUM_INTS, dtype=torch.int64, device=device),
            eos=torch.full((lines, 1), -1, dtype=torch.int64, device=device),
        )
        self.edits = EditState(num_slots, device)
        self.adapters = AdapterSlots(num_slots, device)
        self._stages = np.zeros(lines, dtype=np.int64)  # per slot, bits of the names in `_stage_names` that it needs
        self._stage_names: list[str] = []
        self._stage_sets: set[int] = set()

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; graphs must be captured again."""
        more = num_slots - self.num_slots
        table = self.sampling
        tokens, blocks, floats, ints = (
            _with_lines(tensor, more) for tensor in (self.tokens, self.block_table, table.floats, table.ints)
        )
        sampling = SamplingTable(floats=floats, ints=ints, eos=_with_lines(table.eos, more, fill=-1))
        stages = np.pad(self._stages, (0, more))
        self.edits.grow(num_slots)
        self.adapters.grow(num_slots)
        self.version += 1  # no call between this line and the next two, since an interrupt can only come after a call
        self.tokens, self.block_table, self.sampling, self._stages = tokens, blocks, sampling, stages
        self.num_slots = self.padding_slot = num_slots

    def admit(self, slots: list[int], tokens: Rows, tables: Rows, parameters: list[SlotParameters]) -> None:
        """Write known tokens, block tables and parameters of sequences that got a slot."""
        self._reserve_tokens(max(p.max_length for p in parameters))
        index = self._upload(np.array(slots, dtype=np.int64))
        self._write_rows(self.tokens, index, tokens)
        self._write_rows(self.block_table, index, tables)
        lines = [p.lines for p in parameters]
        self.sampling.floats[index] = self._upload(np.stack([line.floats for line in lines]))
        self.sampling.ints[index] = self._upload(np.stack([line.ints for line in lines]))
        self._reserve_eos(max(len(line.eos) for line in lines))
        eos = np.full((len(slots), self.sampling.eos.shape[1]), -1, dtype=np.int64)
        for row, line in zip(eos, lines, strict=True):
            row[: len(line.eos)] = line.eos
        self.sampling.eos[index] = self._upload(eos)
        self._admit_edits(np.array(slots, dtype=np.int64), parameters)
        self.adapters.admit(slots, [p.adapter for p in parameters])

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
            capacity = min(max(2 * capacity, length), self.max_model_len)
            self.version += 1
            grown = torch.zeros(len(self.tokens), capacity, dtype=torch.int32, device=self.device)
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown

    def _admit_edits(self, slots: np.ndarray, parameters: list[SlotParameters]) -> None:
        for slot, p in zip(slots, parameters, strict=True):
            names = p.lines.edits.features
            if (self.sharded is not None or p.with_top) and p.is_filtered:
                names |= {FILTERS}
            self._stage_names += sorted(names - set(self._stage_names))
            self._stages[slot] = sum(1 << self._stage_names.index(name) for name in names)
        # Also resets a slot whose previous sequence had edits.
        if self._stages[slots].any() or self.edits.in_use:
            self.edits.put(slots, [p.lines.edits for p in parameters])

    def _reserve_eos(self, width: int) -> None:
        grow = width - self.sampling.eos.shape[1]
        if grow > 0:
            self.version += 1
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
