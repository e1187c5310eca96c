"""Packed steps of a clone over paged keys and values, in torch: what a native step does, without kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.models.base import StateKey
from hf_paged.models.proof.calls import AttentionRecord
from hf_paged.models.proof.interface import answered_by, embeddings_of
from hf_paged.models.proof.mask_kinds import MaskKind
from hf_paged.models.proof.stock import cache_argument
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent.view import StateView

BLOCK = 16
SLOTS = 128  # of rows with recurrent states
Row = int | str  # name of a sequence


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor,
           mask: MaskKind, scaling: float | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attend with one row's tokens: query [T, Hq, D] over key [S, Hkv, D] and value [S, Hkv, Dv] -> [T, Hq, Dv]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask.sees(query_at, key_at), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[0]]
    return torch.einsum("hts,shd->thd", weights, value)


class PackedSteps:
    """Steps over rows of packed tokens, and a pool of shuffled blocks for each attention call of a forward.

    `unread`: rows whose attention is zero, because no logits of theirs are compared.
    """

    def __init__(self, model: PreTrainedModel, calls: Sequence[AttentionRecord], blocks: int, *, softcap: bool,
                 unread: Collection[Row] = ()) -> None:
        self._model, self._calls, self._softcap, self._unread = model, calls, softcap, unread
        self._casts = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if self._casts else embeddings_of(model).dtype
        self._keys = [torch.full((blocks * BLOCK, call.key_heads, call.key_size), 3.0, dtype=dtype) for call in calls]
        self._values = [torch.full((blocks * BLOCK, call.key_heads, call.value_size), 3.0, dtype=dtype)
                        for call in calls]
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self._tables: dict[Row, list[int]] = {}
        self._lengths: dict[Row, int] = {}

    def fill(self, row: Row, tokens: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Begin a row with keys [S, Hkv, D] and values [S, Hkv, Dv] of each attention call for its first tokens."""
        slots = self._append(row, tokens)
        for call in range(len(self._calls)):
            self._keys[call][slots], self._values[call][slots] = keys[call], values[call]

    def step(self, rows: Sequence[tuple[Row, Sequence[int]]]) -> dict[Row, torch.Tensor]:
        """Run one forward over the next tokens of some rows; returns the logits [T, V] of each row's tokens."""
        self._rows, self._call = rows, 0
        firsts = [self._lengths.get(row, 0) for row, _ in rows]
        self._new = torch.cat([self._append(row, len(tokens)) for row, tokens in rows])
        self._at = [torch.arange(first, first + len(tokens)) for first, (_, tokens) in zip(firsts, rows, strict=True)]
        self._slots = [self._slots_of(row, 0, self._lengths[row]) for row, _ in rows]
        ids = torch.tensor([token for _, tokens in rows for token in tokens])
        # A mask of four dims goes through stock's code as it is: each row's mask is the engine's to make.
        no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        with answered_by(self._model, self), torch.no_grad():
            logits = self._forward(ids, torch.cat(self._at), no_mask)
        if self._call != len(self._calls):
            raise Refused(f"a packed forward makes {self._call} attention calls, and stock's {len(self._calls)}")
        if len(logits) != len(ids):
            raise Refused(f"a packed forward of {len(ids)} tokens has {len(logits)} rows of logits")
        return {row: part for (row, _), part in zip(rows, logits.split(self._counts()), strict=True)}

    def _forward(self, ids: torch.Tensor, at: torch.Tensor, no_mask: torch.Tensor) -> torch.Tensor:
        """Run the model over packed tokens [T] at these positions [T]; returns logits [T, V]."""
        logits: torch.Tensor = self._model(input_ids=ids[None], position_ids=at[None], attention_mask=no_mask,
                                           use_cache=False, return_dict=True).logits[0]
        return logits

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                 softcap: float | None = None, s_aux: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        index, self._call = self._call, self._call + 1
        if index >= len(self._calls) or self._calls[index].module != self._paths.get(id(module)):
            raise Refused("a packed forward makes its attention calls in another order than stock's")
        keys, values, dtype, batch = self._keys[index], self._values[index], query.dtype, len(query)
        if not self._casts and query.dtype.itemsize < 8 and {query.dtype, key.dtype, value.dtype} != {keys.dtype}:
            raise Refused(f"{type(module).__name__} attends to {key.dtype} by {query.dtype}, and the embedding is "
                          f"{keys.dtype}")
        query, key, value = (x.transpose(1, 2).flatten(0, 1).to(keys.dtype) for x in (query, key, value))
        keys[self._new], values[self._new] = key, value
        parts = []
        for (row, _), at, slots, part in zip(self._rows, self._at, self._slots, query.split(self._counts()),
                                             strict=True):
            if row in self._unread:
                parts.append(value.new_zeros(len(at), query.shape[1], value.shape[2]))
                continue
            parts.append(attend(part, keys[slots], values[slots], at, torch.arange(len(slots)),
                                self._calls[index].mask, scaling, softcap if self._softcap else None, s_aux))
        result = torch.cat(parts).unflatten(0, (batch, -1)).contiguous()
        return result if self._casts else result.to(dtype)

    def _counts(self) -> list[int]:
        return [len(at) for at in self._at]

    def _append(self, row: Row, tokens: int) -> torch.Tensor:
        """Give a row blocks for more tokens; returns their slots."""
        table, before = self._tables.setdefault(row, []), self._lengths.get(row, 0)
        self._lengths[row] = before + tokens
        while len(table) * BLOCK < self._lengths[row]:
            table.append(self._free.pop())
        return self._slots_of(row, before, self._lengths[row])

    def _slots_of(self, row: Row, first: int, end: int) -> torch.Tensor:
        at = torch.arange(first, end)
        return torch.tensor(self._tables[row])[at // BLOCK] * BLOCK + at % BLOCK


class RecurrentSteps(PackedSteps):
    """`PackedSteps` of a model with states of these shapes: a forward for each prompt, and one for all decode rows, a
    batch of single tokens. Slots that no row has written hold NaN."""

    def __init__(self, model: PreTrainedModel, calls: Sequence[AttentionRecord], blocks: int,
                 states: Mapping[StateKey, torch.Tensor], *, softcap: bool, unread: Collection[Row] = (),
                 whole_prompts: bool = False) -> None:
        super().__init__(model, calls, blocks, softcap=softcap, unread=unread)
        self._whole_prompts, self._known = whole_prompts, dict[Row, list[int]]()
        self.tensors = {key: torch.full((SLOTS, *state.shape[1:]), float("nan"), dtype=state.dtype)
                        for key, state in states.items()}
        self._free_slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(4)).tolist()
        self.slots: dict[Row, int] = {}

    def step(self, rows: Sequence[tuple[Row, Sequence[int]]]) -> dict[Row, torch.Tensor]:
        """Run the next tokens of some rows; returns the logits [T, V] of each row's tokens."""
        single = [(row, tokens) for row, tokens in rows if len(tokens) == 1 and row in self.slots]
        found = super().step(single) if single else {}
        names = [row for row, _ in single]
        for row, tokens in rows:
            known = self._known.setdefault(row, [])
            known += tokens
            if row not in names:
                found[row] = self._computed_again(row, known)[-len(tokens):] if self._whole_prompts else super().step(
                    [(row, tokens)])[row]
        return found

    def _computed_again(self, row: Row, tokens: Sequence[int]) -> torch.Tensor:
        """Compute a row from its first token on, in the blocks and the slot that it has."""
        if row in self.slots:
            self.end(row)
        self._lengths[row] = 0
        return super().step([(row, tokens)])[row]

    def fill_states(self, row: Row, states: Mapping[StateKey, torch.Tensor]) -> None:
        """Give a row the states [1, ...] that it has behind its first tokens."""
        slot = self._slot_of(row)
        for key, state in states.items():
            self.tensors[key][slot] = state[0]

    def end(self, row: Row) -> None:
        """Forget a row, whose slot is the next that a new row gets."""
        self._free_slots.append(self.slots.pop(row))

    def _forward(self, ids: torch.Tensor, at: torch.Tensor, no_mask: torch.Tensor) -> torch.Tensor:
        rows = [row for row, _ in self._rows]
        is_new = rows[0] not in self.slots
        view = StateView(self.tensors, torch.tensor([self._slot_of(row) for row in rows]), is_new=is_new)
        given = {str(cache_argument(self._model)): view, "use_cache": True}  # with a cache, no mask is needed
        logits: torch.Tensor = self._model(input_ids=ids.view(len(rows), -1), position_ids=at.view(len(rows), -1),
                                           return_dict=True, **given).logits
        view.store()
        return logits.flatten(0, 1)

    def _slot_of(self, row: Row) -> int:
        if row not in self.slots:
            self.slots[row] = self._free_slots.pop()
        return self.slots[row]
