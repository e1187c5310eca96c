"""Executor of a model of any class, by an outline of the model: what one recorded forward of it showed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.hints import DTYPE_OF_AUTOCAST, ENABLE_AGAIN, EVAL_MODE, ONE_DTYPE
from hf_paged.guards.original_classes import of_model_class
from hf_paged.guards.original_code import OriginalCode
from hf_paged.guards.snapshot import EXPERTS, experts_implementation
from hf_paged.models.base import AttentionMask, KVSpec, PoolShape, StateShape, StepContext
from hf_paged.models.derivation.known_code import KnownCode
from hf_paged.models.derivation.rows_in_dtype import Precision, RowsIn
from hf_paged.models.executor import KNOWN_LAYERS, ModelExecutor, float_weights, plain_values
from hf_paged.models.experts import ExpertForwards
from hf_paged.models.images.decoder_inputs import decoder_below, feeding
from hf_paged.models.paged_calls import implementation_of
from hf_paged.models.tuners import inside_wrappers
from hf_paged.parallel.layers import stock_class

_NO_HEADS = (1, 1, 16)  # of queries, of keys, and their size, where no attention is called: backends need sizes
_NOT_READ = ("_attn_implementation_internal", EXPERTS, "use_cache")  # compared otherwise, and given by each step


class AttentionLayout(NamedTuple):
    """One attention call of a forward: its module's path, its shapes, and which positions it reads."""

    module: str
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    mask: AttentionMask


class ModelOutline(NamedTuple):
    """What a forward of a model showed: its attention calls in order, and the class of each module by path.

    ``body`` is the path of the module from whose output the class's forward makes logits, and whose forward makes all
    the attention calls. ``constants``: `constants_of` the model.
    """

    model_class: type
    body: str
    calls: tuple[AttentionLayout, ...]
    classes: Mapping[str, type]
    num_logits: int
    max_length: int
    longest: int  # the same beyond the config's positions, if its frequencies are known there
    constants: tuple
    max_step_tokens: int | None = None  # None: any number
    # What rows do in each precision that was tried; None in place of it all: they never depend on others.
    precisions: dict[Precision, RowsIn] | None = None
    has_stock_cache: bool = True
    ignores_train_mode: bool = False  # all modules but layers at the paths that are called as they stand
    states: tuple[StateShape, ...] = ()
    whole_prompts: bool = False
    dtype: torch.dtype | None = None  # of the embedding, which the dtypes of states depend on


OUTLINES: WeakKeyDictionary[PreTrainedModel, ModelOutline] = WeakKeyDictionary()
"""Outlines of models whose packed forwards are known to compute what the models' own forwards do."""


def _shape_of(outline: ModelOutline) -> tuple:
    """Return what an engine's pools and limits are made of."""
    return (outline.body, outline.calls, outline.max_length, outline.longest, outline.max_step_tokens, outline.states,
            outline.dtype)


class DerivedExecutor(ModelExecutor):
    """Executor that runs the modules of a model as they stand, by the model's outline; on a GPU kernels compute norms,
    gated MLPs and RoPE whose code is known."""

    def __init__(self, model: PreTrainedModel, *, outline: ModelOutline,
                 derive: Callable[[PreTrainedModel], ModelOutline | Reason],
                 rows_in: Callable[[PreTrainedModel, Precision], RowsIn], fused_kernels: bool = True,
                 fused_experts: bool = True, routed_experts: bool = False, **techniques: Any) -> None:
        """Run a model by its outline.

        ``derive`` makes the outline of the model as it is after a change; ``rows_in`` says what rows of a step do in a
        precision; ``fused_experts``: whether kernels may compute experts.
        """
        self.outline, self._derive, self._rows_in = outline, derive, rows_in
        self._called = frozenset(path for path, kind in outline.classes.items() if kind in KNOWN_LAYERS)
        shapes = [PoolShape(call.num_kv_heads, call.head_dim, call.value_dim) for call in outline.calls]
        sizes = {(call.num_heads, *shape) for call, shape in zip(outline.calls, shapes, strict=True)}
        self._are_alike = len(sizes) <= 1
        is_one_shape = self._are_alike and all(shape.head_dim == shape.value_dim for shape in shapes)
        self._pools = () if is_one_shape else tuple(shapes)
        self._masks = tuple(call.mask for call in outline.calls)
        super().__init__(model, outline.model_class, sys.modules[outline.model_class.__module__],
                         routed_experts=routed_experts)
        self._experts = ExpertForwards(self, is_wanted=fused_experts and fused_kernels)
        self._known_code = KnownCode(self, is_wanted=fused_kernels)
        self.inner_decoder = decoder_below(self.model, outline.body, [call.module for call in outline.calls])
        paths = (outline.body, *(call.module for call in outline.calls))
        # One path for each config: each step looks them up. A module that gets another config later does not call paged
        # attention, which `running` notices.
        self._config_paths = tuple({id(self.model.get_submodule(path).config): path for path in paths}.values())

    @property
    def decoder(self) -> Any:
        return self.model.get_submodule(self.outline.body)

    @property
    def body(self) -> str:
        return self.outline.body

    @property
    def config(self) -> Any:
        return self.decoder.config

    def attention_configs(self) -> list[Any]:
        return [self.model.get_submodule(path).config for path in self._config_paths]

    def kv_spec(self) -> KVSpec:
        weight, calls = self.model.get_input_embeddings().weight, self.outline.calls
        sizes = calls[0][1:4] if calls else _NO_HEADS
        return KVSpec(len(calls), *sizes, self.autocast or weight.dtype, weight.dtype, weight.device, self._pools,
                      self._are_alike, routes=self.routes)

    @property
    def has_stock_cache(self) -> bool:
        return self.outline.has_stock_cache

    def masks(self) -> tuple[AttentionMask, ...]:
        return self._masks

    def max_length(self, asked: int | None = None) -> int:
        return self.outline.max_length if asked is None else min(asked, self.outline.longest)

    def why_limited(self, length: int, max_new_tokens: int) -> Reason:
        return Reason("{} tokens with {} new ones, and the model's positions, or the proof of its class, end at {}",
                      length, max_new_tokens, self.max_length(length), remedy="Ask for fewer tokens.")

    @property
    def max_step_tokens(self) -> int | None:
        return self.outline.max_step_tokens

    @property
    def num_logits(self) -> int:
        return self.outline.num_logits

    def original_code(self) -> OriginalCode:
        return of_model_class(self.model_class, frozenset(map(stock_class, self.outline.classes.values())))

    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        # A module that the outline lacks has no class that it may have.
        return ((path, module, self.outline.classes.get(path, nn.Module)) for path, module in self._modules()
                if path not in self._called)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((path, module) for path, module in self._modules() if path in self._called)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return modules_below(self.model, self._called)

    def constants(self) -> tuple:
        return constants_of(self.model, self._called)

    def why_not_constants(self) -> Reason | None:
        reasons = (self._why_not_outline, self.why_not_instance, self._why_not_mode, self.why_not_registry)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def _why_not_outline(self) -> Reason | None:
        """Return why the model as it is now has no outline with the same attention calls, or None."""
        if self.constants() == self.outline.constants and self.outline.classes.keys() <= dict(self._modules()).keys():
            return None
        found = self._derive(self.source)  # takes seconds, where a proof is not stored
        if isinstance(found, Reason):
            return found
        if _shape_of(found) != _shape_of(self.outline):
            return Reason("the config changed, and with it the attention or the lengths of sequences",
                          remedy=ENABLE_AGAIN)
        self.outline = found
        return None

    def prepare(self, max_model_len: int) -> None:
        self._experts.prepare()

    def drop_references(self) -> None:
        super().drop_references()
        self._experts.drop_references()
        self._known_code.drop_references()

    def why_not_experts(self, device: torch.device) -> str | None:
        return self._experts.why_not(device)

    def body_of_step(self, step: StepContext, forwards: Mapping[str, Callable[..., Any]]) -> nn.Module:
        body = super().body_of_step(step, {**self._known_code.forwards(), **self._experts_of(step), **forwards})
        if step.fed is None or self.inner_decoder is None:
            return body
        return feeding(body, self.inner_decoder.removeprefix(f"{self.body}."), step.fed)

    def _experts_of(self, step: StepContext) -> dict[str, Callable[..., Any]]:
        """Return the forwards of a step's blocks of experts by kernels, by path below the decoder."""
        return {} if self.autocast is not None else self._experts.of_step(len(step.positions), step.row_lengths)

    def why_not_precision(self, autocast: torch.dtype | None) -> Reason | None:
        precision, rows = self._rows_under(autocast)
        if rows is None:
            return super().why_not_precision(autocast)
        if (why := rows.why_mixed) is None:
            return None
        name = self.model_class.__name__
        if autocast is not None:
            return Reason("autocast to {}, for which {} is not proved: {}", autocast, name, why,
                          remedy=DTYPE_OF_AUTOCAST)
        dtypes = sorted({str(dtype) for _, dtype in precision.weights})
        return Reason("weights of dtype {}, for which {} is not proved: {}", " and ".join(dtypes), name, why,
                      remedy=ONE_DTYPE)

    def _rows_under(self, autocast: torch.dtype | None) -> tuple[Precision, RowsIn | None]:
        """Return the precision under this autocast, and what rows do in it; None: they never depend on others."""
        known, precision = self.outline.precisions, precision_of(self.model, self._called, autocast)
        if known is not None and precision not in known:
            known[precision] = self._rows_in(self.source, precision)
        return precision, None if known is None else known[precision]

    def _why_not_mode(self) -> Reason | None:
        # Layers that are called, new ones of a resized vocabulary for instance, may be in train mode: eligibility looks
        # for dropout in them.
        if not self.outline.ignores_train_mode and any(module.training for _, module, _ in self.own_modules()):
            return Reason("the model is in train mode, where it may drop out", remedy=EVAL_MODE)
        return None


def modules_below(module: nn.Module, called: Collection[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules below one with their paths, without those inside of a layer at a path in `called`.

    In place of wrappers that have LoRA of experts' weights the experts.
    """
    for key, child in ((key, inside_wrappers(child)) for key, child in module.named_children()):
        name = f"{path}.{key}" if path else key
        yield name, child
        if name not in called:
            yield from modules_below(child, called, name)


def precision_of(model: nn.Module, called: Collection[str], autocast: torch.dtype | None = None) -> Precision:
    """Return the precision of a model; of layers at the paths in `called`, only weights whose dtype is computed in."""
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in modules_below(model, called):
            named = [("weight", weight) for weight in float_weights(module)] if path in called else (
                module.named_parameters(recurse=False))
            yield from ((f"{path}.{key}", weight) for key, weight in named if weight.is_floating_point())

    return Precision.of(weights(), autocast)


def constants_of(model: PreTrainedModel, called: Collection[str]) -> tuple:
    """Return what forwards of a model read besides tensors: the fields of configs, and plain attributes of modules.

    ``called``: paths of layers that may be replaced by others of any known kind, whose attributes do not count.
    """
    modules = {path: module for path, module in modules_below(model, called) if path not in called}
    found = (vars(module).get("config") for module in (model, *modules.values()))
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    fields = [(type(config).__name__, implementation_of(config), experts_implementation(config),
               repr({name: value for name, value in vars(config).items() if name not in _NOT_READ}))
              for config in configs.values()]
    return fields, {path: plain_values(module) for path, module in modules.items()}
