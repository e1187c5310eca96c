"""Steps of few decode rows in one launch for all layers, if the kernel supports the model and is compiled.

The launch reads a table of the addresses of weights, norms and caches (`LayersPlan`). Making the table allocates and
copies to the device, so it is made in eager steps, and again once any address in it has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_paged.kernels.attention.types import AttentionOptions
from hf_paged.kernels.build.compiling import compiled_ahead, is_complete_dry_run, is_dry
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.kernels.hopper.decoder_layers_support import Decoder
from hf_paged.models.linears import LinearView

logger = logging.getLogger(__name__)

_NOT_PLAIN, _BIASES = "linear layers have LoRA, or are not plain ones", "linear layers have biases"


class Rows(NamedTuple):
    """Inputs of a step of R rows of one new token each, in the order of the kernel's arguments.

    ``cos`` and ``sin`` [positions, D], ``slots`` [R] int32, ``positions`` and ``slot_mapping`` [R] int64,
    ``block_table`` [S, max_blocks] int32.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor


class OneLaunch:
    """Plans of one model, one for each number of rows, and the state of their kernels.

    No step waits for the compiler. A kernel that is compiled while requests run is used once no request runs: it rounds
    differently than layer by layer, and the tokens of a request must not depend on the time of compiling.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._key: tuple | None = None  # of the decoder that the plans are for
        self._plans: dict[int, Any] = {}  # None: the kernel does not support it
        self._compiled: dict[int, list[Future[object]]] = {}
        self._ready: set[int] = set()
        self._have_run: set[int] = set()  # a kernel's first launch loads it, which no graph can record
        self._captured: list[torch.Tensor] = []

    def look_again(self) -> None:
        """Use the kernels that are compiled by now; to be called while no request runs."""
        self._ready |= {rows for rows, kernels in self._compiled.items() if _are_done(kernels)}

    def is_ready(self, rows: int) -> bool:
        """Return whether one launch would compute a step: the kernel supported the last one, and is compiled."""
        return rows in self._ready and support.why_not_on(self.device) is None

    def run(self, decoder: Decoder, hidden: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """Compute final normed hidden states [R, H] of embedded tokens [R, H]; returns None if it cannot, unchanged."""
        captures, count = _is_captured(self.device), len(hidden)
        may_prepare = not (captures or is_dry())
        if support.why_not_on(self.device) is not None or not _fits(hidden, rows):
            return None
        if is_complete_dry_run():
            with suppress(ValueError):  # the kernel does not support the layers
                support.plan_of(decoder, count).run(hidden, *rows)
            return None
        key = decoder.key()
        if key != self._key or count not in self._plans:
            if not may_prepare:
                return None
            self._prepare(decoder, key, hidden, rows)
        plan = self._plans.get(count)
        if plan is None or count not in self._ready or (captures and count not in self._have_run):
            return None
        try:
            for kernel in self._compiled[count]:
                kernel.result()
            made: torch.Tensor = plan.run(hidden, *rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compiling failed, or the driver refuses a cooperative launch (under MPS)
            support.refuse(self.device, error)
            if captures:
                raise
            return None
        if captures:
            self._captured += support.own_tensors(plan)
        elif may_prepare:
            self._have_run.add(count)
        return made

    def captured_tensors(self) -> list[torch.Tensor]:
        """Return the plans' tensors that launches captured since the last call read."""
        captured, self._captured = self._captured, []
        return captured

    def drop_references(self) -> None:
        """Release the memory of weights and caches until the next step."""
        self._key, self._plans = None, {}

    def _prepare(self, decoder: Decoder, key: tuple, hidden: torch.Tensor, rows: Rows) -> None:
        """Make the plan for so many rows, and start compiling its kernel if needed; after an error there is no plan."""
        if key != self._key:
            self._plans, self._key = {}, key
        count = len(hidden)
        try:
            plan = support.plan_of(decoder, count)
            compiled = compiled_ahead(partial(plan.run, hidden, *rows))
        except torch.OutOfMemoryError:  # layer by layer no such memory is needed
            return
        except ValueError as error:
            logger.info("hf_paged: steps of %d rows run layer by layer: %s", count, error)
            self._plans[count] = None
            self._ready.discard(count)
            return
        except Exception as error:  # an untested version of Gluon, or no thread can be started
            support.refuse(self.device, error)
            return
        self._plans[count], self._compiled[count] = plan, compiled
        if _are_done(compiled):
            self._ready.add(count)
        else:
            self._ready.discard(count)


def _are_done(kernels: list[Future[object]]) -> bool:
    return all(kernel.done() for kernel in kernels)


def why_not(layers: Sequence[Any], final_norm: Any) -> str | None:
    """Return why the kernel cannot run these layers (`LayerParts`), whatever their tensors, or None."""
    norms = [norm for layer in layers for norm in (layer.input_norm, layer.post_norm, *(layer.head_norms or ()))]
    if len({norm.variance_epsilon for norm in (*norms, final_norm)}) > 1:
        return "norms have several epsilons"
    if {layer.options for layer in layers} != {AttentionOptions(layers[0].options.scale)}:
        return "attention has a window, a softcap or sinks, or layers have several scales"
    if any(layer.gate_up is None for layer in layers):
        return "layers have experts"
    views = (view for x in layers for view in (x.qkv, x.gate_up, x.o_proj, x.down_proj))
    return next(filter(None, map(_of_view, views)), None)


def decoder_of(layers: Sequence[Any], final_norm: Any, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Decoder:
    """Return the tensors, at their present places, that the kernel reads of layers that it supports (`why_not`)."""
    found = []
    for layer, cache in zip(layers, caches, strict=True):
        head_norms = layer.head_norms or (None, None)
        found.append((layer.qkv.weight, _weight_of(layer.o_proj), layer.gate_up.weight, _weight_of(layer.down_proj),
                      *cache,
                      layer.input_norm.weight, layer.post_norm.weight,
                      *(None if norm is None else norm.weight for norm in head_norms)))
    return Decoder(tuple(found), final_norm.weight, final_norm.variance_epsilon, layers[0].options.scale)


def _weight_of(view: LinearView) -> torch.Tensor:
    """Return the weight of a view of one layer: its copy, if there is one."""
    (linear,) = view.linears
    weight: Any = linear.weight if view.weight is None else view.weight
    return weight


def _of_view(view: LinearView) -> str | None:
    if view.lora is not None or not view.are_plain:
        return _NOT_PLAIN
    if view.weight is not None and len(view.linears) > 1:  # first, since this runs before every eager step
        return None if view.bias is None else _BIASES
    if any(linear.bias is not None for linear in view.linears):
        return _BIASES
    return None if len(view.linears) == 1 else "projections of one input are not merged"


def _fits(hidden: torch.Tensor, rows: Rows) -> bool:
    """Return whether a step's tensors are as the kernel reads them; a plan's tensors are checked when it is made."""
    return (
        len(hidden) in support.ROWS and hidden.is_contiguous() and rows.cos.is_contiguous()
        and rows.sin.is_contiguous() and hidden.dtype == rows.cos.dtype == rows.sin.dtype
        and rows.cos.shape[1] == support.HEAD_DIM and rows.block_table.stride(1) == 1
    )


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
