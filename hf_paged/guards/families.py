"""Fused families: models whose layers run by hf_paged's code and kernels, and the classes of their modules.

Checked against transformers 5.17 to 5.24. A family's modeling file is imported only for a model of the family.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from torch import nn
from transformers.activations import ACT2FN

SILU = (nn.SiLU, type(ACT2FN["silu"]))  # classes of the activation that the families' kernels compute
# By attribute name: classes of the module, without the family's prefix. Modules under other names must be layers that
# compute each token by itself (linear, embedding, LoRA, quantized).
_LLAMA: Mapping[str, tuple[str, ...]] = {
    "model": ("Model",),
    "layers": ("DecoderLayer",),
    "self_attn": ("Attention",),
    "mlp": ("MLP",),
    "input_layernorm": ("RMSNorm",),
    "post_attention_layernorm": ("RMSNorm",),
    "norm": ("RMSNorm",),
    "rotary_emb": ("RotaryEmbedding",),
}
_QWEN3 = {**_LLAMA, "q_norm": ("RMSNorm",), "k_norm": ("RMSNorm",)}
_EXPERTS = {"mlp": ("SparseMoeBlock", "MLP"), "experts": ("Experts",), "gate": ("TopKRouter",)}


@dataclass(frozen=True)
class Family:
    """Properties of a fused family that its executor needs."""

    package: str  # under transformers.models
    prefix: str  # of its classes' names
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _LLAMA, hash=False)
    # Layers whose masks have a sliding window in stock: none, all, or those with such a layer_type.
    windows: Literal["none", "all", "by layer"] = "none"

    @property
    def model_name(self) -> str:
        return f"{self.prefix}ForCausalLM"

    @property
    def module_name(self) -> str:
        return f"transformers.models.{self.package}.modeling_{self.package}"

    @property
    def modeling(self) -> ModuleType:
        return importlib.import_module(self.module_name)

    @property
    def model_class(self) -> type:
        kind: type = getattr(self.modeling, self.model_name)
        return kind

    def classes(self, part: str) -> tuple[type, ...]:
        """Return the classes that an attribute of this name may hold; () if the family has no such part."""
        return tuple(getattr(self.modeling, self.prefix + name) for name in self.parts.get(part, ()))

    def class_names(self) -> list[str]:
        """Return the names of all classes of the modeling file that a model may contain, the causal LM's included."""
        return [self.model_name, *sorted({self.prefix + name for names in self.parts.values() for name in names})]


FAMILIES = (
    Family("qwen3", "Qwen3", _QWEN3, "by layer"),
    Family("qwen3_moe", "Qwen3Moe", {**_QWEN3, **_EXPERTS}, "all"),
    Family("llama", "Llama"),
)


def family_of(model: Any) -> Family | None:
    """Return the family of the class of `model` or a base class, or None, also for another activation than SiLU."""
    if getattr(model.config, "hidden_act", None) not in ("silu", "swish"):
        return None
    names = {(cls.__module__, cls.__name__) for cls in type(model).__mro__}
    return next((family for family in FAMILIES if (family.module_name, family.model_name) in names), None)
