"""What all decoders of `families.py` have in common: shapes, which modules are inside, and whether all is as known."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_paged.models.activations import ELEMENTWISE
from hf_paged.models.base import KVSpec, ModelExecutor
from hf_paged.models.families import Family
from hf_paged.models.guards.compressed import is_known_forward
from hf_paged.models.guards.originals import of_family, patched_class, patched_entry
from hf_paged.models.paged_calls import implementation_of
from hf_paged.models.parts import Part, parts_of
from hf_paged.models.rope import longest_unchanged
from hf_paged.parallel.layers import VocabParallelEmbedding, VocabParallelHead, stock_class
from hf_paged.parallel.shards import local_kv_heads

# Of the config, what forwards read while they run.
CONFIG_CONSTANTS = (
    "num_hidden_layers", "num_attention_heads", "sliding_window", "layer_types", "final_logit_softcapping", "is_causal",
    "use_bidirectional_attention", "_experts_implementation",
)


class DecoderExecutor(ModelExecutor):
    """An executor for one family; how its layers run on packed tokens is left to the subclasses."""

    def __init__(self, model: PreTrainedModel, *, family: Family, **techniques: bool) -> None:
        super().__init__(model, getattr(family.modeling, family.model_name), **techniques)
        self._family = family
        of_family(family)  # taken now, before anybody patches what he enabled

    def kv_spec(self) -> KVSpec:
        config, weight = self.model.config, self.model.model.embed_tokens.weight
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = local_kv_heads(config.num_key_value_heads, self.group.size)
        return KVSpec(len(self._layers()), kv_heads, head_dim, weight.dtype, weight.dtype, weight.device)

    def max_length(self) -> int:
        return longest_unchanged(self.model.config)

    @property
    def vocab_size(self) -> int:
        embedding = self.model.model.embed_tokens
        if isinstance(embedding, VocabParallelEmbedding):
            return embedding.vocab_size
        return embedding.weight.shape[0]

    @property
    def num_logits(self) -> int:
        head = self.model.lm_head
        if type(head) is nn.Linear:
            return len(head.weight)
        number: int = getattr(head, "vocab_size" if isinstance(head, VocabParallelHead) else "out_features",
                              self.vocab_size)
        return number

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        config = self.model.config
        experts = getattr(config, "num_experts_per_tok", None) or 0
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        per_token = experts * (3 * inner // self.group.size + 2 * config.hidden_size)
        per_token *= self.kv_spec().compute_dtype.itemsize
        return super().step_bytes(num_tokens, num_rows) + num_tokens * per_token

    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        return ((part.name, part.module, part.expected) for part in self._parts() if part.expected is not None)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((p.name, p.module) for p in self._parts() if p.expected is None and not p.is_activation)

    def activations(self) -> tuple[type, ...]:
        return tuple({type(part.module): None for part in self._parts() if part.is_activation})

    def patched(self) -> str | None:
        return of_family(self._family).patched()

    def asked_of_model(self) -> frozenset[str]:
        return of_family(self._family).names(self.model_class)

    def may_have_float_weight(self, module: nn.Module) -> bool:
        return self._family.casts_norms and type(module) in self._family.classes("norm")

    def constants_reason(self) -> str | None:
        if not self._layers():
            return "the model has no layers"
        reasons = (self._config_reason, self._layer_reason, self._code_reason, self.registry_reason,
                   self._experts_reason)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def _layers(self) -> list[Any]:
        # A list first: a slice of a ModuleList registers every layer again, in every step.
        return list(self.model.model.layers)[: self.model.config.num_hidden_layers]

    def _parts(self) -> list[Part]:
        return parts_of(self.model, self._family)

    def _config_reason(self) -> str | None:
        config, name = self.model.config, implementation_of(self.model.config)
        for part in self._parts():
            own = vars(part.module).get("config", config)
            if part.expected is not None and own is not config and _read_in_forwards(own) != _read_in_forwards(config):
                return f"{part.name} has another config than the model"
        if not getattr(config, "is_causal", True):
            return "config.is_causal is False"
        if getattr(config, "use_bidirectional_attention", None):
            return "config.use_bidirectional_attention is set"
        if self._family.beyond_sdpa is not None and not self._carries_all(name):
            return f"attention implementation {name!r} leaves out {self._family.beyond_sdpa}, which pages would not"
        if self.num_logits > self.vocab_size:
            return f"lm_head has {self.num_logits} rows, the embedding {self.vocab_size}: a token may have no vector"
        if len(getattr(config, "layer_types", None) or self._layers()) < len(self._layers()):
            return "config.layer_types is shorter than the model"
        return None

    def _carries_all(self, name: str | None) -> bool:
        """Does this implementation take all that attention hands it, or leave out what pages leave out with it?"""
        if name == "sdpa":
            return self._family.beyond_sdpa == "softcap" and self.model_class._supports_sdpa
        return name is not None and (name in ("eager", "flex_attention") or name.startswith("flash_attention"))

    def _layer_reason(self) -> str | None:
        spec = self.kv_spec()
        heads = self.model.config.num_attention_heads // self.group.size
        for i, layer in enumerate(self._layers()):
            attention = layer.self_attn
            if not attention.is_causal or attention.layer_idx != i:
                return f"layer {i}'s attention is not causal, or not layer {i}'s"
            if attention.head_dim != spec.head_dim:
                return f"layer {i} has head_dim={attention.head_dim}, its config {spec.head_dim}"
            if attention.num_key_value_groups * spec.num_kv_heads != heads:
                return f"layer {i} has {attention.num_key_value_groups} query heads to a KV head, its config others"
            window = self._mask_window(i)
            if getattr(attention, "sliding_window", window) != window:
                return f"layer {i} has sliding_window={attention.sliding_window}, its config {window}"
            if window is not None and window < 2:  # stock's cache then keeps all keys, and its masks follow the cache
                return f"layer {i} has sliding_window={window}: expected None or at least 2"
        return None

    def _mask_window(self, layer: int) -> int | None:
        """The window of the mask that stock makes for this layer."""
        config, windows = self.model.config, self._family.windows
        if windows == "by layer":
            windows = "all" if config.layer_types[layer] == "sliding_attention" else "none"
        return config.sliding_window if windows == "all" else None

    def _code_reason(self) -> str | None:
        """Helpers besides `forward` (a norm's `_norm`, a gate's `_apply_gate`) are the class' own, too."""
        methods: dict[type, frozenset[str]] = {}
        for name, module, expected, is_activation in self._parts():
            kind = type(module) if is_activation else expected
            if kind is None:
                continue
            kind = stock_class(kind)
            if kind not in methods:
                if is_activation and kind not in ELEMENTWISE:
                    return f"the activation {name} is a {kind.__module__}.{kind.__name__}"
                if is_activation and (place := patched_class((kind,))) is not None:
                    return f"{place} is patched"
                methods[kind] = frozenset(k for k, v in vars(kind).items() if isinstance(v, FunctionType))
            replaced = methods[kind].intersection(vars(module))
            if replaced - {"forward"} or (replaced and not is_known_forward(module)):
                return f"{min(replaced)} of {name} is replaced on the instance"
        return None

    def registry_reason(self) -> str | None:
        """Experts compute one token at a time in all of transformers' implementations; a user's may not."""
        if "experts" not in self._family.parts:
            return None
        name = self.model.config._experts_implementation
        function = ALL_EXPERTS_FUNCTIONS.get(name)
        if not (name in (None, "eager") if function is None else patched_entry(function) is None):
            return f"experts implementation {name!r} is not one of transformers' own"
        return None

    def _experts_reason(self) -> str | None:
        """Experts are of the model's dtype, like the inputs that they get."""
        if "experts" not in self._family.parts:
            return None
        dtype: torch.dtype = self.kv_spec().compute_dtype
        kinds = self._family.classes("experts")
        for path, module, expected in self.own_modules():
            if stock_class(expected) in kinds:
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype != dtype:
                        return f"mixed dtypes: {path}.{key} is {parameter.dtype}, the embedding {dtype}"
        return None


def _read_in_forwards(config: Any) -> list[Any]:
    return [implementation_of(config), *(repr(getattr(config, name, None)) for name in CONFIG_CONSTANTS)]


def plain_values(module: nn.Module) -> list[tuple[str, Any]]:
    """Numbers and names that a module keeps as attributes, in its order; train mode is none of them."""
    return [(k, v) for k, v in vars(module).items() if type(v) in _PLAIN and k != "training" and k[0] != "_"]


_PLAIN = frozenset({bool, int, float, str})
