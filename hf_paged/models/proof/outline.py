"""Outline of a full-size model, from one forward on the meta device: its attention calls, and the code that ran."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.base import StateShape
from hf_paged.models.proof.calls import AttentionRecord, Recorder
from hf_paged.models.proof.clone import on_meta
from hf_paged.models.proof.interface import answered_by, configs_of
from hf_paged.models.proof.lengths import config_lengths
from hf_paged.models.proof.line_counts import LineCounts, modeling_files
from hf_paged.models.proof.stock import cache_argument, parameters_of
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent import view

_TOKENS = 8
_MOST_KNOWN = 64  # elements of a tensor


@dataclass(frozen=True)
class Outline:
    """What a forward of 8 tokens does, whatever its numbers are."""

    calls: tuple[AttentionRecord, ...]
    lines: frozenset[str]  # of modeling files, as "file:line"
    given: frozenset[str]  # arguments that calls of functions gave, as "file:line (name)"
    classes: frozenset[str]  # of modules, with their modules' names
    states: tuple[StateShape, ...] = ()


def outline(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Outline:
    """Run a model of this config on the meta device, without weights; may raise `Refused`."""
    return outline_of(on_meta(cls, config))


def outline_of(model: PreTrainedModel) -> Outline:
    """Run a model that is on the meta device; may raise `Refused`."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise Refused("the model has an encoder beside its decoder")
    cache = cache_argument(model) if view.keeps_states(model.config) else None
    if cache is not None and not view.HAS_IDIOM:
        raise Refused("it keeps a recurrent state, for which this version of transformers asks no other cache")
    if cache is None and "position_ids" not in parameters_of(model):
        raise Refused("its forward takes no position_ids")
    for one in configs_of(model):
        one._experts_implementation_internal = "batched_mm"  # of any sizes
    recorder, states = Recorder(model, farthest(model.config), _no_numbers), view.recorder()
    # A mask of ones, as stock's `generate` has: without mask and cache, transformers looks at the positions' numbers.
    ones = torch.ones(1, _TOKENS, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"attention_mask": ones, "use_cache": False}
    if cache is not None:
        options = {cache: states, "use_cache": True}
    lines = LineCounts(modeling_files(model.modules()))
    positions = torch.arange(_TOKENS)[None]
    without_numbers = positions.to("meta")
    with (answered_by(model, recorder) as recorder.masks, torch.no_grad(), KnownNumbers(without_numbers, positions),
          lines.counting()):
        model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device="meta"), position_ids=without_numbers,
              return_dict=True, **options)
    if recorder.calls and "position_ids" not in parameters_of(model):
        raise Refused("its forward takes no position_ids")
    if not recorder.calls and not states.held:
        raise Refused("no module calls the attention interface of transformers")
    classes = {f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
    given = (f"{file}:{line} ({name})" for (file, line), names in lines.filled.items() for name in names)
    return Outline(tuple(recorder.calls), frozenset(f"{file}:{line}" for file, line in lines.counts),
                   frozenset(given), frozenset(classes),
                   tuple(StateShape(key, (*state.shape[1:],), state.dtype) for key, state in states.held.items()))


def farthest(config: PreTrainedConfig) -> int:
    """Return a position beyond every number of a config that may be a length."""
    return max(config_lengths(config) | {1000}) + 50


def check_alike(full: Outline, small: Outline) -> None:
    """Raise `Refused` with what a model does and its clone does not, or the other way round."""
    if lines := sorted(full.lines ^ small.lines):
        places = ", ".join(Path(line).name for line in lines[:3])
        raise Refused(f"the full size runs other code than a small clone, at {places}")
    if given := sorted(full.given ^ small.given):
        places = ", ".join(Path(one).name for one in given[:3])
        raise Refused(f"the full size gives functions other arguments than a small clone, at {places}")
    if classes := sorted(full.classes ^ small.classes):
        raise Refused(f"the full size has other modules than a small clone: {', '.join(classes[:3])}")
    if bool(full.states) != bool(small.states):
        raise Refused("the full size keeps states, and a small clone none, or the other way round")
    if kinds := sorted(map(str, _kinds(full) ^ _kinds(small))):
        raise Refused(f"the full size attends otherwise than a small clone: {', '.join(kinds[:3])}")


def _kinds(one: Outline) -> set[tuple]:
    return {(call.mask, call.softcap, call.sinks) for call in one.calls}


def _no_numbers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any) -> torch.Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[3])


class KnownNumbers(TorchDispatchMode):
    """Computes small tensors on the meta device a second time on the CPU, where all that they are made of is known:
    conditions may depend on positions."""

    def __init__(self, known: torch.Tensor, numbers: torch.Tensor) -> None:
        """Know the numbers of one tensor on the meta device."""
        super().__init__()
        self._known = {id(known): (known, numbers)}  # by id of a tensor, which is kept alive

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        is_known = bool(given) and all(id(one) in self._known for one in given)
        if func is torch.ops.aten._local_scalar_dense.default and is_known:
            return self._numbers(args[0]).item()
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._known.pop(id(given[0]) if given else 0, None)
        elif is_known and isinstance(result, torch.Tensor) and result.numel() <= _MOST_KNOWN:
            known_args, known_kwargs = tree_map(self._numbers, (args, kwargs))
            with suppress(IndexError, RuntimeError):  # numbers that the meta device does not look at
                self._known[id(result)] = result, func(*known_args, **known_kwargs)
        return result

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[id(value)][1]
        return "cpu" if isinstance(value, torch.device) else value
