"""Executor of a family in the table: shapes, windows and modules of its models, by the names of their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.families import Family
from hf_paged.guards.hints import DISAGREE, ONE_DTYPE, PUT_BACK, UNDO_REPLACEMENT
from hf_paged.guards.original_classes import ELEMENTWISE, of_family
from hf_paged.guards.original_code import OriginalCode
from hf_paged.models.base import AttentionMask, KVSpec
from hf_paged.models.executor import ModelExecutor
from hf_paged.models.paged_calls import implementation_of
from hf_paged.models.rope import longest_length
from hf_paged.parallel.layers import (
    VocabParallelHead,
    local_kv_heads,
    sharded_class,
    stock_class,
)

# Fields of the config that forwards read while they run.
CONFIG_CONSTANTS = (
    "num_hidden_layers", "num_attention_heads", "sliding_window", "layer_types", "final_logit_softcapping", "is_causal",
    "use_bidirectional_attention", "_experts_implementation", "logits_scaling", "rope_parameters",
)
_SHAPES = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
_ACTIVATIONS = ("act_fn", "activation_fn")


class ModulePart(NamedTuple):
    """Module of a model; `expected` is the class it has to have, None for a layer of any known kind (linear, LoRA)."""

    name: str
    module: nn.Module
    expected: type | None
    is_activation: bool = False


class FamilyExecutor(ModelExecutor):
    """Executor that runs one family's modules on packed tokens as they stand."""

    body = "model"

    def __init__(self, model: PreTrainedModel, *, family: Family, **techniques: bool) -> None:
        self.family = family
        self.has_experts = "experts" in family.parts
        self._spec: tuple[tuple, KVSpec] | None = None  # with the values that it was read from
        super().__init__(model, family.model_class, family.modeling)

    def original_code(self) -> OriginalCode:
        return of_family(self.family)

    @property
    def decoder(self) -> Any:
        return self.model.model

    @property
    def config(self) -> Any:
        return self.model.config

    def kv_spec(self) -> KVSpec:
        # Kept, since every step reads it and a config takes microseconds for each of its fields.
        config, decoder, size = self.config, self.decoder, self.group.size
        weight, fields = decoder.embed_tokens.weight, vars(config)
        made_of = (weight.dtype, weight.device, self.autocast, size, len(decoder.layers),
                   fields.get("_heterogeneity_spec"), *map(fields.get, _SHAPES))
        if self._spec is None or self._spec[0] != made_of:
            heads = config.num_attention_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            self._spec = made_of, KVSpec(
                len(self._layers()), heads // size, local_kv_heads(config.num_key_value_heads, size), head_dim,
                self.autocast or weight.dtype, weight.dtype, weight.device)
        return self._spec[1]

    def masks(self) -> tuple[AttentionMask, ...]:
        return tuple(AttentionMask(self._mask_window(layer)) for layer in range(len(self._layers())))

    def max_length(self, asked: int | None = None) -> int:
        return longest_length(self.config, asked)

    @property
    def num_logits(self) -> int:
        head = self.model.lm_head
        if type(head) is nn.Linear:
            return len(head.weight)
        number: int = getattr(head, "vocab_size" if isinstance(head, VocabParallelHead) else "out_features",
                              self.vocab_size)
        return number

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        config, size = self.config, self.group.size
        experts = getattr(config, "num_experts_per_tok", None) or 0
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        per_token = 8 * config.hidden_size + 3 * config.intermediate_size // size
        per_token += experts * (3 * inner // size + 2 * config.hidden_size)
        # Autocast copies what it casts; the copy of the head is the largest, and the last.
        cast = 0 if self.autocast is None else config.hidden_size * config.vocab_size * self.autocast.itemsize
        itemsize = self.kv_spec().compute_dtype.itemsize
        return num_tokens * per_token * itemsize + num_rows * config.vocab_size * 4 * 4 + cast

    def attention_configs(self) -> list[Any]:
        modules = (self.decoder, *(layer.self_attn for layer in self._layers()))
        return list({id(module.config): module.config for module in modules}.values())

    def _layers(self) -> list[Any]:
        # A list first: slicing a ModuleList would register every layer again in every step.
        return list(self.decoder.layers)[: self.config.num_hidden_layers]

    def _mask_window(self, layer: int) -> int | None:
        """Return the window of the mask that stock makes for this layer."""
        config, windows = self.config, self.family.windows
        if windows == "by layer":
            windows = "all" if config.layer_types[layer] == "sliding_attention" else "none"
        return config.sliding_window if windows == "all" else None

    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        return ((part.name, part.module, part.expected) for part in self._parts() if part.expected is not None)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((p.name, p.module) for p in self._parts() if p.expected is None and not p.is_activation)

    def activations(self) -> tuple[type, ...]:
        return tuple({type(part.module): None for part in self._parts() if part.is_activation})

    def why_not_constants(self) -> Reason | None:
        if not self._layers():
            return Reason("the model has no layers", remedy=DISAGREE)
        reasons = (self._why_not_config, self._why_not_layer, self._why_not_code, self.why_not_registry,
                   self._why_not_experts)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def _why_not_config(self) -> Reason | None:
        config = self.config
        for part in self._parts():
            own = vars(part.module).get("config", config)
            if part.expected is not None and own is not config and _read_in_forwards(own) != _read_in_forwards(config):
                return Reason("{} has another config than the model", part.name, remedy=DISAGREE)
        if not getattr(config, "is_causal", True):
            return Reason("config.is_causal is False", remedy=DISAGREE)
        if getattr(config, "use_bidirectional_attention", None):
            return Reason("config.use_bidirectional_attention is set", remedy=DISAGREE)
        if self.num_logits > self.vocab_size:
            return Reason("lm_head has {} rows, the embedding {}: a token may have no vector", self.num_logits,
                          self.vocab_size, remedy="`model.resize_token_embeddings(n)` changes both.")
        if len(getattr(config, "layer_types", None) or self._layers()) < len(self._layers()):
            return Reason("config.layer_types is shorter than the model", remedy=DISAGREE)
        return None

    def _why_not_layer(self) -> Reason | None:
        spec = self.kv_spec()
        for i, layer in enumerate(self._layers()):
            attention = layer.self_attn
            if not attention.is_causal or attention.layer_idx != i:
                return Reason("layer {0}'s attention is not causal, or not layer {0}'s", i, remedy=DISAGREE)
            if attention.head_dim != spec.head_dim:
                return Reason("layer {} has head_dim={}, its config {}", i, attention.head_dim, spec.head_dim,
                              remedy=DISAGREE)
            if attention.num_key_value_groups * spec.num_kv_heads != spec.num_heads:
                return Reason("layer {} has {} query heads to a KV head, its config others", i,
                              attention.num_key_value_groups, remedy=DISAGREE)
            window = self._mask_window(i)
            if getattr(attention, "sliding_window", window) != window:
                return Reason("layer {} has sliding_window={}, its config {}", i, attention.sliding_window, window,
                              remedy=DISAGREE)
            if window is not None and window < 2:  # stock's cache then keeps all keys, and its masks follow the cache
                return Reason("layer {} has sliding_window={}: expected None or at least 2", i, window,
                              remedy="Set a window of at least two tokens, or None.")
        return None

    def _why_not_code(self) -> Reason | None:
        """Return why an activation, or a helper of a module (a norm's `_norm`), is not the class's own, or None."""
        methods: dict[type, frozenset[str]] = {}
        for name, module, expected, is_activation in self._parts():
            kind = type(module) if is_activation else expected
            if kind is None:
                continue
            kind = stock_class(kind)
            if kind not in methods:
                if is_activation and kind not in ELEMENTWISE:
                    return Reason("the activation {} is a {}.{}", name, kind.__module__, kind.__name__,
                                  remedy=PUT_BACK)
                methods[kind] = frozenset(k for k, v in vars(kind).items() if isinstance(v, FunctionType))
            # Eligibility checks replaced forwards of all modules.
            if replaced := methods[kind].intersection(vars(module)) - {"forward"}:
                return Reason("{} of {} is replaced on the instance", min(replaced), name, remedy=UNDO_REPLACEMENT)
        return None

    def _why_not_experts(self) -> Reason | None:
        """Return which expert weight lacks the model's dtype, in which experts get their inputs, or None."""
        if not self.has_experts:
            return None
        dtype: torch.dtype = self.kv_spec().compute_dtype
        kinds = self.family.classes("experts")
        for path, module, expected in self.own_modules():
            if stock_class(expected) in kinds:
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype != dtype:
                        return Reason("mixed dtypes: {}.{} is {}, the embedding {}", path, key, parameter.dtype, dtype,
                                      remedy=ONE_DTYPE)
        return None

    def _parts(self) -> list[ModulePart]:
        """Return all modules of the model, except modules inside of a layer that is called as it stands."""
        model, family = self.model, self.family
        classes = {name: family.classes(name) for name in family.parts}
        if experts := classes.get("experts"):
            classes["experts"] = (*experts, *map(sharded_class, experts))
        return list(_parts_inside("", model, classes))


def _parts_inside(path: str, module: nn.Module, classes: dict[str, tuple[type, ...]]) -> Iterator[ModulePart]:
    for key, child in module._modules.items():
        if child is None:
            continue
        name = f"{path}.{key}" if path else key
        if key == "layers" and type(child) is nn.ModuleList:
            for i, layer in enumerate(child):
                yield from _part(f"{name}.{i}", layer, classes["layers"], classes)
        elif key in classes:
            yield from _part(name, child, classes[key], classes)
        elif key in _ACTIVATIONS:
            yield ModulePart(name, child, None, is_activation=True)
        else:
            yield ModulePart(name, child, nn.Dropout if type(child) is nn.Dropout else None)


def _part(name: str, module: nn.Module, allowed: tuple[type, ...],
          classes: dict[str, tuple[type, ...]]) -> Iterator[ModulePart]:
    is_known = type(module) in allowed
    yield ModulePart(name, module, type(module) if is_known else allowed[0])
    if is_known:
        yield from _parts_inside(name, module, classes)


def _read_in_forwards(config: Any) -> list[Any]:
    return [implementation_of(config), *(repr(getattr(config, name, None)) for name in CONFIG_CONSTANTS)]
