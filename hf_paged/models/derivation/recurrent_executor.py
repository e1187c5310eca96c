"""Executor of models with a recurrent state: prompts one by one or packed, decode rows as a batch of one token each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.hints import DTYPE_OF_AUTOCAST, ENABLE_AGAIN
from hf_paged.kernels._triton import why_not_on
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.recurrent.packed_convolution import PackedRows
from hf_paged.models.base import KVSpec, StateShape, StepContext
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.executor import ModelExecutor, final_states
from hf_paged.models.paged_calls import paged_call, running
from hf_paged.models.recurrent import delta_net, mamba2, view
from hf_paged.models.tuners import by_row
from hf_paged.parallel.group import group_of
from hf_paged.parallel.replica import replica_of

HERE = "It runs in stock. On one CPU or GPU, causal LMs that are proved run natively."
_KERNELS = (delta_net, mamba2)  # files that have a kernel for layers of some classes
_NO_LIMITS = (0.0, float("inf"))
_USUAL_LENGTH = 1 << 15  # of a model without positions


def why_no_states(model: PreTrainedModel, model_class: type) -> Reason | None:
    """Return why a model with a recurrent state does not run natively, whatever its class is proved to compute."""
    device = model.device.type
    if not view.HAS_IDIOM:
        return _not_yet(model_class, f"under transformers {transformers.__version__}")
    if device not in ("cpu", "cuda", "meta"):
        return _not_yet(model_class, f"on {device}")
    if group_of(model).is_parallel or replica_of(model) is not None:
        return _not_yet(model_class, "over several ranks")
    return None


def _not_yet(model_class: type, where: str) -> Reason:
    return Reason("{} keeps a recurrent state, which steps {} do not have yet", model_class.__name__, where,
                  remedy=HERE)


def _zeros(*args: Any, **options: Any) -> torch.Tensor:
    """Return zeros like the first tensor that a layer is given, its hidden states."""
    return torch.zeros_like(next(value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)))


def _kind_of(layer: Any) -> Any:
    """Return the file that has kernels for a layer that some file `handles`."""
    return next(kind for kind in _KERNELS if kind.handles(layer))


class RecurrentExecutor(DerivedExecutor):
    """Executor whose steps (`runner/recurrent`) are one prompt's next tokens, those of several if
    `packs_prompts`, or one token of each of several rows."""

    has_states = True

    def __init__(self, *args: Any, fused_kernels: bool = True, **options: Any) -> None:
        self._cast_states: dict[torch.dtype, tuple[StateShape, ...]] = {}  # by dtype of autocast
        self._wants_kernels = fused_kernels
        # For a structure of the model, paths within the decoder, and whether kernels compute packed prompts.
        self._by_kernel: tuple[int, list[str], bool] | None = None
        super().__init__(*args, fused_kernels=fused_kernels, **options)

    @property
    def whole_prompts(self) -> bool:  # type: ignore[override]
        return self.outline.whole_prompts

    @property
    def least_chunk(self) -> int:  # type: ignore[override]
        # Mamba-2 clamps the steps of prompts, and not those of single tokens behind a state.
        limits = (vars(module).get("time_step_limit", _NO_LIMITS) for module in self.decoder.modules())
        return 1 if all(tuple(pair) == _NO_LIMITS for pair in limits) else 2

    def kv_spec(self) -> KVSpec:
        return super().kv_spec()._replace(states=self._states())

    def _states(self) -> tuple[StateShape, ...]:
        """Return the states in the dtypes that stock's cache has under the present autocast."""
        if self.autocast is None:
            return self.outline.states
        if self.autocast not in self._cast_states:
            _, rows = self._rows_under(self.autocast)
            dtypes = {} if rows is None else rows.states
            self._cast_states[self.autocast] = tuple(
                state._replace(dtype=dtypes.get(state.key[1:], state.dtype)) for state in self.outline.states)
        return self._cast_states[self.autocast]

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        meta, lengths = step.parts[0][2], step.row_lengths
        assert len(step.parts) == 1 and step.ends is None
        # A row that computes all of its tokens begins, whatever its slot holds of an earlier sequence.
        is_new, packs = meta.max_query_len == meta.max_seq_len, lengths is None and self.packs_prompts
        if packs and meta.max_query_len == 1 and not is_new and self.least_chunk > 1:  # decode rows: pieces are longer
            packs, lengths = False, meta.seq_lens
        if packs:
            states = step.cache.states.packed_view(PackedRows(meta.query_start, meta.seq_lens, meta.slots))
            forwards = self._forwards_by(lambda kind: kind.prompts)
        else:
            states = step.cache.states.view(meta.slots, is_new=is_new, lengths=lengths)
            forwards = {} if is_new or lengths is None else self._forwards_by(lambda kind: kind.decode)
        if is_dry():
            forwards = self.left_out() | forwards
        decoder = self.body_of_step(step, forwards)
        with (paged_call(self.attention_configs()), running(step, self.masks()), self._casting(),
              by_row(self._adapted, self.adapter_rows(step.adapters))):
            hidden = final_states(decoder, input_ids, step.positions, states)
        states.store()
        return hidden

    @property
    def packs_prompts(self) -> bool:  # type: ignore[override]
        """Whether a step's prompts may lie one behind the other in one forward: kernels compute all layers with states,
        and these are of the decoder's own file, which is known by its code to mix tokens nowhere else."""
        return self._known_kernels()[1]

    def _known_kernels(self) -> tuple[list[str], bool]:
        structure = self.watch.step_structure(self.model)
        if self._by_kernel is None or self._by_kernel[0] != structure:
            spec, file = self.kv_spec(), type(self.decoder).__module__
            why = self._why_not_kernels(spec.device)
            paths = [path for path, reason in why.items() if reason is None]
            layers = [self.decoder.get_submodule(path) for path in paths]
            packs = len(layers) == len({state.key[0] for state in self.outline.states}) and all(
                _kind_of(layer).packs(layer, spec.compute_dtype, spec.device)
                and type(layer).__module__ == file for layer in layers)
            self._by_kernel = structure, paths, packs
        return self._by_kernel[1:]

    def _forwards_by(self, forward_of: Callable[[Any], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return the forwards by kernels of all layers that have them, by path below the decoder."""
        layers = {path: self.decoder.get_submodule(path) for path in self._known_kernels()[0]}
        return {path: partial(forward_of(_kind_of(layer)), layer) for path, layer in layers.items()}

    def left_out(self) -> dict[str, Callable[..., Any]]:
        """Return forwards that compute nothing of all layers with states, by path below the decoder: their own have no
        kernel of hf_paged, may call other packages, which a GPU that is not there does not run, and scan prompts, some
        token by token."""
        numbers = {state.key[0] for state in self.outline.states}
        attention = {id(self.model.get_submodule(call.module)) for call in self.outline.calls}
        layers = [(path, module) for path, module in self.decoder.named_modules()
                  if vars(module).get("layer_idx") in numbers and id(module) not in attention
                  and view.cache_argument(type(module).forward) is not None]
        within = tuple(path for path, _ in layers)
        return {path: _zeros for path, _ in layers if not any(other.startswith(f"{path}.") for other in within)}

    def _why_not_kernels(self, device: torch.device) -> dict[str, str | None]:
        """Return why each layer with a state would run by its own module in decode steps on a device, or None, by its
        path within the decoder; of layers for which there is a kernel."""
        layers = [(path, module, kind) for path, module in self.decoder.named_modules() for kind in _KERNELS
                  if kind.handles(module)]
        spec, why = self.kv_spec(), why_not_on(device)
        if not self._wants_kernels:
            why = "fused_kernels=False"
        elif self.autocast is not None:
            why = f"autocast to {self.autocast}"
        return {path: why or kind.misfit(layer, spec.states, spec.compute_dtype) for path, layer, kind in layers}

    def why_not_kernels(self, device: torch.device) -> str | None:
        """Return why some layer with a state would run by its own module in decode steps on a device, or None."""
        found = self._why_not_kernels(device)
        reasons = [f"{path}: {why}" for path, why in found.items() if why is not None]
        if len(found) < len({state.key[0] for state in self.outline.states}):
            reasons.append("there are kernels for delta nets of Qwen3-Next and Qwen3.5 and most of Mamba-2 alone")
        return reasons[0] if reasons else None

    def max_length(self, asked: int | None = None) -> int:
        # The tables of requests have a column for each token.
        return super().max_length(_USUAL_LENGTH if asked is None and not self.outline.calls else asked)

    def why_not_constants(self) -> Reason | None:
        return why_no_states(self.source, self.model_class) or super().why_not_constants()

    def why_not_precision(self, autocast: torch.dtype | None) -> Reason | None:
        if (dtype := self.kv_spec().compute_dtype) != self.outline.dtype:
            return Reason("weights of dtype {}, which were {} when the model was enabled", dtype, self.outline.dtype,
                          remedy=ENABLE_AGAIN)
        if autocast is not None and self.model.device.type != "cpu":
            return Reason("autocast to {}, under which the dtypes of {}'s states are known on a CPU alone", autocast,
                          self.model_class.__name__, remedy=DTYPE_OF_AUTOCAST)
        return ModelExecutor.why_not_precision(self, autocast) or super().why_not_precision(autocast)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        # A prompt makes all states, and decode rows gather those of one layer at a time, if no kernel reads them.
        spec, by_layer = self.kv_spec(), Counter[int]()
        for state in spec.states:
            by_layer[state.key[0]] += state.nbytes
        if self.packs_prompts:
            layer = self.decoder.get_submodule(self._known_kernels()[0][0])
            return super().step_bytes(num_tokens, num_rows) + num_tokens * _kind_of(layer).token_bytes(
                layer, spec.compute_dtype)
        gathered = 0 if self.why_not_kernels(spec.device) is None else 2 * num_rows * max(by_layer.values())
        return super().step_bytes(num_tokens, num_rows) + spec.state_bytes + gathered
