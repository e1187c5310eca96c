"""Executor of a model of any class, by an outline of the model: what one recorded forward of it showed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.hints import DISAGREE, DTYPE_OF_AUTOCAST, EVAL_MODE, ONE_DTYPE, SHARD, UNDO_REPLACEMENT
from hf_paged.guards.original_classes import of_model_class
from hf_paged.guards.original_code import OriginalCode
from hf_paged.models.base import AttentionMask, KVSpec, PoolShape, StateShape
from hf_paged.models.executor import KNOWN_LAYERS, ModelExecutor, plain_values
from hf_paged.models.paged_calls import implementation_of

_NO_HEADS = (1, 1, 16)  # of queries, of keys, and their size, where no attention is called: backends need sizes
_NOT_READ = ("_attn_implementation_internal", "use_cache")  # compared otherwise, and given by each step


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
    constants: tuple
    max_step_tokens: int | None = None  # None: any number
    dtype: torch.dtype | None = None  # for which rows were found not to depend on others; None: any
    has_stock_cache: bool = True
    states: tuple[StateShape, ...] = ()
    whole_prompts: bool = False


OUTLINES: WeakKeyDictionary[PreTrainedModel, ModelOutline] = WeakKeyDictionary()
"""Outlines of models whose packed forwards are known to compute what the models' own forwards do."""


class DerivedExecutor(ModelExecutor):
    """Executor that runs the modules of a model as they stand, by the model's outline."""

    def __init__(self, model: PreTrainedModel, *, outline: ModelOutline, **techniques: bool) -> None:
        self.outline = outline
        self._called = frozenset(path for path, kind in outline.classes.items() if kind in KNOWN_LAYERS)
        shapes = [PoolShape(call.num_kv_heads, call.head_dim, call.value_dim) for call in outline.calls]
        sizes = {(call.num_heads, *shape) for call, shape in zip(outline.calls, shapes, strict=True)}
        self._are_alike = len(sizes) <= 1
        is_one_shape = self._are_alike and all(shape.head_dim == shape.value_dim for shape in shapes)
        self._pools = () if is_one_shape else tuple(shapes)
        self._masks = tuple(call.mask for call in outline.calls)
        paths = (outline.body, *(call.module for call in outline.calls))
        # One path for each config: each step looks them up. A module that gets another config later does not call paged
        # attention, which `running` notices.
        self._config_paths = tuple({id(model.get_submodule(path).config): path for path in paths}.values())
        super().__init__(model, outline.model_class, sys.modules[outline.model_class.__module__])

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
                      self._are_alike)

    @property
    def has_stock_cache(self) -> bool:
        return self.outline.has_stock_cache

    def masks(self) -> tuple[AttentionMask, ...]:
        return self._masks

    def max_length(self, asked: int | None = None) -> int:
        return self.outline.max_length if asked is None else min(asked, self.outline.max_length)

    def why_limited(self, length: int, max_new_tokens: int) -> Reason:
        return Reason("{} tokens with {} new ones, and the model's positions, or the proof of its class, end at {}",
                      length, max_new_tokens, self.max_length(length), remedy="Ask for fewer tokens.")

    @property
    def max_step_tokens(self) -> int | None:
        return self.outline.max_step_tokens

    @property
    def vocab_size(self) -> int:
        return len(self.model.get_input_embeddings().weight)

    @property
    def hidden_size(self) -> int:
        size: int = self.model.get_input_embeddings().weight.shape[1]
        return size

    @property
    def num_logits(self) -> int:
        return self.outline.num_logits

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        linear = [module for module in self.decoder.modules() if isinstance(module, nn.Linear)]
        hidden = self.model.get_input_embeddings().weight.shape[1]
        widest = max((layer.out_features for layer in linear), default=hidden)
        experts = getattr(self.config, "num_experts_per_tok", None) or 1
        per_token = 8 * hidden + experts * (3 * widest + 2 * hidden)
        return num_tokens * per_token * self.kv_spec().compute_dtype.itemsize + num_rows * self.num_logits * 4 * 4

    def original_code(self) -> OriginalCode:
        return of_model_class(self.model_class, frozenset(self.outline.classes.values()))

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
        if self.replica is not None or self.group.is_parallel:
            return Reason("{} is sharded over several ranks, and its class is in no table of families",
                          self.model_class.__name__, remedy=SHARD)
        reasons = (self._why_not_outline, self._why_not_dtype, self._why_not_instance, self._why_not_mode,
                   self.why_not_registry)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def _why_not_outline(self) -> Reason | None:
        if missing := self.outline.classes.keys() - dict(self._modules()).keys():
            return Reason("the model lacks {}, which its outline has", min(missing), remedy=DISAGREE)
        if self.constants() != self.outline.constants:
            return Reason("the config, or a number in a module, changed since the outline was made", remedy=DISAGREE)
        return None

    def _why_not_dtype(self) -> Reason | None:
        """Return why the dtype of calls is not one for which the model is known to compute each row alone, or None."""
        if self.outline.dtype is None:
            return None
        dtype = self.kv_spec().compute_dtype
        if dtype != self.outline.dtype:
            return Reason("weights of dtype {}, which were {} when the model was enabled", dtype, self.outline.dtype,
                          remedy="Disable the model, and enable it again.")
        if (cast := self.autocast or self.autocast_of_call()) is not None:
            return Reason("autocast to {}, for which {} is not proved", cast, self.model_class.__name__,
                          remedy=DTYPE_OF_AUTOCAST)
        return None

    def _why_not_instance(self) -> Reason | None:
        """Return which function of a module is replaced on the instance, or which weight has another dtype, or None."""
        dtype = self.kv_spec().compute_dtype
        for path, module, _ in self.own_modules():
            # Eligibility checks replaced forwards of all modules.
            kind = type(module)
            if replaced := [k for k in vars(module) if k != "forward" and callable(getattr(kind, k, None))]:
                return Reason("{} of {} is replaced on the instance", min(replaced), path, remedy=UNDO_REPLACEMENT)
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point() and parameter.dtype != dtype and self.autocast is None:
                    return Reason("mixed dtypes: {}.{} is {}, the embedding {}", path, key, parameter.dtype, dtype,
                                  remedy=ONE_DTYPE)
        return None

    def _why_not_mode(self) -> Reason | None:
        # `resize_token_embeddings` makes new layers, of train mode.
        if any(module.training for module in self.model.modules() if type(module) not in (nn.Linear, nn.Embedding)):
            return Reason("the model is in train mode, where it may drop out", remedy=EVAL_MODE)
        return None


def modules_below(module: nn.Module, called: Collection[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules below one with their paths, without those inside of a layer at a path in `called`."""
    for key, child in module.named_children():
        name = f"{path}.{key}" if path else key
        yield name, child
        if name not in called:
            yield from modules_below(child, called, name)


def constants_of(model: PreTrainedModel, called: Collection[str]) -> tuple:
    """Return what forwards of a model read besides tensors: the fields of configs, and plain attributes of modules.

    ``called``: paths of layers that may be replaced by others of any known kind, whose attributes do not count.
    """
    modules = {path: module for path, module in modules_below(model, called) if path not in called}
    found = (vars(module).get("config") for module in (model, *modules.values()))
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    fields = [(type(config).__name__, implementation_of(config),
               repr({name: value for name, value in vars(config).items() if name not in _NOT_READ}))
              for config in configs.values()]
    return fields, {path: plain_values(module) for path, module in modules.items()}
