"""Executor of a fused family: shapes, windows and modules of its models, by the names of their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.families import SILU, Family
from hf_paged.guards.hints import DISAGREE
from hf_paged.guards.original_classes import of_family
from hf_paged.guards.original_code import OriginalCode
from hf_paged.models.base import AttentionMask, KVSpec
from hf_paged.models.executor import ModelExecutor
from hf_paged.models.rope import longest_length
from hf_paged.parallel.layers import VocabParallelHead, local_kv_heads, sharded_class

_SHAPES = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
# A module of a model, its path, and the class it has to have; None for a layer of any known kind (linear, LoRA).
_Part = tuple[str, nn.Module, type | None]


class FamilyExecutor(ModelExecutor):
    """Executor that runs a fused family's modules on packed tokens as they stand."""

    body = "model"

    def __init__(self, model: PreTrainedModel, *, family: Family) -> None:
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
        return ((name, module, expected) for name, module, expected in self._parts() if expected is not None)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module, expected in self._parts() if expected is None)

    def why_not_constants(self) -> Reason | None:
        reasons = (self._why_not_config, self._why_not_layer, self.why_not_instance, self.why_not_registry)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def _why_not_config(self) -> Reason | None:
        config, layers = self.config, self._layers()
        if not layers:
            return Reason("the model has no layers", remedy=DISAGREE)
        for name, module, _ in self.own_modules():
            own = vars(module).get("config", config)
            if own is not config and vars(own) != vars(config):
                return Reason("{} has another config than the model", name, remedy=DISAGREE)
        if not getattr(config, "is_causal", True):
            return Reason("config.is_causal is False", remedy=DISAGREE)
        if self.num_logits > self.vocab_size:
            return Reason("lm_head has {} rows, the embedding {}: a token may have no vector", self.num_logits,
                          self.vocab_size, remedy="`model.resize_token_embeddings(n)` changes both.")
        if len(getattr(config, "layer_types", None) or layers) < len(layers):
            return Reason("config.layer_types is shorter than the model", remedy=DISAGREE)
        return None

    def _why_not_layer(self) -> Reason | None:
        spec = self.kv_spec()
        for i, layer in enumerate(self._layers()):
            window = self._mask_window(i)
            expected = {"is_causal": True, "layer_idx": i, "head_dim": spec.head_dim, "sliding_window": window,
                        "num_key_value_groups": spec.num_heads / spec.num_kv_heads}
            for name, value in expected.items():
                if (found := getattr(layer.self_attn, name, value)) != value:
                    return Reason("layer {} has {}={}: its config expects {}", i, name, found, value, remedy=DISAGREE)
            if window is not None and window < 2:  # stock's cache then keeps all keys, and its masks follow the cache
                return Reason("layer {} has sliding_window={}: expected None or at least 2", i, window,
                              remedy="Set a window of at least two tokens, or None.")
        return None

    def _parts(self) -> list[_Part]:
        """Return all modules of the model, except modules inside of a layer that is called as it stands."""
        classes = {name: self.family.classes(name) for name in self.family.parts} | {"act_fn": SILU}
        if experts := classes.get("experts"):
            classes["experts"] = (*experts, *map(sharded_class, experts))
        return list(_parts_inside("", self.model, classes))


def _parts_inside(path: str, module: nn.Module, classes: dict[str, tuple[type, ...]]) -> Iterator[_Part]:
    for key, child in module._modules.items():
        name = f"{path}.{key}" if path else key
        if key == "layers" and type(child) is nn.ModuleList:
            for i, layer in enumerate(child):
                yield from _part(f"{name}.{i}", layer, classes["layers"], classes)
        elif child is not None:
            yield from _part(name, child, classes.get(key, ()), classes)


def _part(name: str, module: nn.Module, allowed: tuple[type, ...],
          classes: dict[str, tuple[type, ...]]) -> Iterator[_Part]:
    is_known = type(module) in allowed
    yield name, module, type(module) if is_known else next(iter(allowed), None)
    if is_known:
        yield from _parts_inside(name, module, classes)
