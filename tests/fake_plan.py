"""In place of the plan of one launch for all layers: the same on a CPU, in plain torch over the pages."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from layers_reference import row_of_layers
from support import HostMemory

from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.models import linears, one_launch


class FakePlan:
    """`LayersPlan` of tensors of any size and dtype; `epoch` counts launches, as the kernel does."""

    def __init__(self, decoder: support.Decoder) -> None:
        self.decoder, self.final_norm = decoder, decoder.final_norm
        self.epoch = torch.ones(1, dtype=torch.int32)
        self.rows: list[int] = []  # of each launch
        self.conflicts: list[int] = []  # slots that a row read and another one wrote

    def run(self, hidden, cos, sin, slots, positions, slot_mapping, block_table):
        if is_dry():
            return torch.empty_like(hidden)
        self.epoch += 1
        self.rows.append(len(hidden))
        self._look_for_conflicts(slots, positions, slot_mapping, block_table)
        return torch.stack([
            self._row(hidden[i], cos[positions[i]], sin[positions[i]], block_table[slots[i]], int(positions[i]),
                      int(slot_mapping[i])) for i in range(len(hidden))
        ])

    def _look_for_conflicts(self, slots, positions, slot_mapping, block_table):
        """The kernel has no order of rows: none may read where another one writes."""
        block_size = self.decoder.layers[0][4].shape[1]
        for i, length in enumerate(positions.tolist()):
            at = torch.arange(max(length, 0))
            read = block_table[slots[i]][at // block_size].long() * block_size + at % block_size
            others = [slot for j, slot in enumerate(slot_mapping.tolist()) if j != i]
            self.conflicts += set(others).intersection(read.tolist())

    def _row(self, x, cos, sin, line, position, slot):
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        made = row_of_layers(self.decoder, x, cos, sin, line, max(position, 0), dtype,
                             lambda t: t.to(x.dtype).to(dtype))
        for (_, _, _, _, keys, values, *_), (key, value) in zip(self.decoder.layers, made.new, strict=True):
            if slot >= 0:
                keys.view(-1, *keys.shape[2:])[slot], values.view(-1, *values.shape[2:])[slot] = key, value
        return made.hidden.to(x.dtype)


class Plans:
    """Every plan that was made; `compiled` is what the next ones get of the compiler: None, that it is done."""

    def __init__(self) -> None:
        self.made: list[FakePlan] = []
        self.compiled: Future[object] | None = None
        self.is_captured = False

    @property
    def rows(self) -> list[int]:
        """Of each launch of all plans."""
        return [rows for plan in self.made for rows in plan.rows]


def fake_plans(monkeypatch) -> Plans:
    """From now on a CPU has the kernel, and it takes every plain model whose weights can be merged."""
    plans = Plans()

    def plan_of(decoder, rows):
        plans.made.append(FakePlan(decoder))
        return plans.made[-1]

    monkeypatch.setattr(linears, "adjacent_memory", HostMemory)
    for name, value in (("_why_not_on", lambda device: None), ("_refused", {}), ("why_not_of", lambda *_: None),
                        ("plan_of", plan_of)):
        monkeypatch.setattr(support, name, value)
    monkeypatch.setattr(one_launch, "compiled_ahead", lambda run: [plans.compiled] if plans.compiled else [])
    monkeypatch.setattr(one_launch, "_is_captured", lambda device: plans.is_captured)
    return plans
