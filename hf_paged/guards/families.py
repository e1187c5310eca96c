"""Model families that run on the paged cache: the classes of each family's modules, and how the family computes.

Checked against transformers 5.17 to 5.24. A family's modeling file is imported only for a model of the family.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar, Literal

# By attribute name: classes of the module, without the family's prefix. Modules under other names are called on packed
# tokens as well, and must be layers that compute each token by itself (linear, embedding, LoRA, quantized).
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
_HEAD_NORMS = {"q_norm": ("RMSNorm",), "k_norm": ("RMSNorm",)}
_OUTER_NORMS = {"pre_feedforward_layernorm": ("RMSNorm",), "post_feedforward_layernorm": ("RMSNorm",)}
_POST_NORMS = {name: classes for name, classes in _LLAMA.items() if name != "input_layernorm"} | {
    "post_feedforward_layernorm": ("RMSNorm",),
}
_EXPERTS = {"experts": ("Experts",), "gate": ("TopKRouter",)}
_SCALED_EMBEDDING = {"embed_tokens": ("TextScaledWordEmbedding",)}


@dataclass(frozen=True)
class _Modeling:
    """A modeling file of transformers, and its class that has `generate`."""

    package: str  # under transformers.models
    prefix: str  # of its classes' names
    suffix: ClassVar[str] = ""  # of the name of the class that has `generate`

    @property
    def model_name(self) -> str:
        return f"{self.prefix}{self.suffix}"

    @property
    def module_name(self) -> str:
        return f"transformers.models.{self.package}.modeling_{self.package}"

    @property
    def modeling(self) -> ModuleType:
        return importlib.import_module(self.module_name)


class Wrapper(_Modeling):
    """Image-text model whose `model.language_model` is the decoder of a family: calls with text alone run there."""

    suffix = "ForConditionalGeneration"

    @property
    def body(self) -> type:
        """Class of the wrapper's `model`, which holds the decoder and the vision tower."""
        body: type = getattr(self.modeling, f"{self.prefix}Model")
        return body


@dataclass(frozen=True)
class Family(_Modeling):
    """Properties of a model family that executors need."""

    suffix = "ForCausalLM"
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _LLAMA, hash=False)
    # Layers whose masks have a sliding window in stock: none, all, or those with such a layer_type.
    windows: Literal["none", "all", "by layer"] = "none"
    # Argument that its attention passes to the attention function, and that sdpa would ignore.
    beyond_sdpa: Literal["softcap", "s_aux"] | None = None
    casts_norms: bool = False  # norms with fp32 weights return their input's dtype
    fused: bool = False  # layers run by hf_paged's code and kernels, not by transformers' modules
    wrapper: Wrapper | None = None  # the image-text model that contains the decoder

    @property
    def model_class(self) -> type:
        """Class of the whole model: the wrapper's if there is a wrapper."""
        holder = self.wrapper or self
        kind: type = getattr(holder.modeling, holder.model_name)
        return kind

    def classes(self, part: str) -> tuple[type, ...]:
        """Return the classes that an attribute of this name may hold; () if the family has no such part."""
        return tuple(getattr(self.modeling, self.prefix + name) for name in self.parts.get(part, ()))

    def class_names(self) -> list[str]:
        """Return the names of all classes of the modeling file that a model may contain, the causal LM's included."""
        return [self.model_name, *sorted({self.prefix + name for names in self.parts.values() for name in names})]


FAMILIES = (
    Family("qwen3", "Qwen3", windows="by layer", parts={**_LLAMA, **_HEAD_NORMS}, fused=True),
    Family("qwen3_moe", "Qwen3Moe", windows="all", fused=True, parts={
        **_LLAMA, **_HEAD_NORMS, **_EXPERTS, "mlp": ("SparseMoeBlock", "MLP"),
    }),
    Family("llama", "Llama", fused=True),
    Family("mistral", "Mistral", windows="all"),
    Family("qwen2", "Qwen2", windows="by layer"),
    Family("gemma2", "Gemma2", windows="by layer", beyond_sdpa="softcap",
           parts={**_LLAMA, **_OUTER_NORMS, **_SCALED_EMBEDDING}),
    Family("gemma3", "Gemma3", windows="by layer",
           parts={**_LLAMA, **_OUTER_NORMS, **_SCALED_EMBEDDING, **_HEAD_NORMS, "model": ("TextModel",)}),
    Family("phi3", "Phi3", windows="all"),
    Family("olmo2", "Olmo2", parts={**_POST_NORMS, **_HEAD_NORMS}),
    Family("gpt_oss", "GptOss", windows="by layer", beyond_sdpa="s_aux", casts_norms=True,
           parts={**_LLAMA, "experts": ("Experts",), "router": ("TopKRouter",)}),
    Family("smollm3", "SmolLM3", windows="by layer"),
    Family("granite", "Granite"),
    Family("glm", "Glm"),
    Family("glm4", "Glm4", parts={
        **_LLAMA, "post_self_attn_layernorm": ("RMSNorm",), "post_mlp_layernorm": ("RMSNorm",),
    }),
    Family("mixtral", "Mixtral", windows="all", parts={**_LLAMA, **_EXPERTS, "mlp": ("SparseMoeBlock",)}),
    Family("olmo3", "Olmo3", windows="by layer", parts={**_POST_NORMS, **_HEAD_NORMS}),
    Family("ministral", "Ministral", windows="by layer"),
    Family("ministral3", "Ministral3", windows="all"),
)


WRAPPERS = (
    Wrapper("gemma3", "Gemma3"), Wrapper("mistral3", "Mistral3"), Wrapper("llava", "Llava"),
    Wrapper("llava_next", "LlavaNext"),
)
SUPPORTED = tuple(one.model_name for one in (*FAMILIES, *WRAPPERS))


def family_of(model: Any) -> Family | None:
    """Return the family of the class of `model`, a base class or the wrapped decoder, or None. Imports nothing."""
    names = _class_names(model)
    for family in FAMILIES:
        if (family.module_name, family.model_name) in names:
            return family
    wrapper = next((w for w in WRAPPERS if (w.module_name, w.model_name) in names), None)
    if wrapper is None:
        return None
    inside = _class_names(getattr(model.model, "language_model", None))
    for family in FAMILIES:
        if any((family.module_name, family.prefix + name) in inside for name in family.parts["model"]):
            return replace(family, wrapper=wrapper, fused=False)
    return None


def _class_names(model: Any) -> set[tuple[str, str]]:
    return {(cls.__module__, cls.__name__) for cls in type(model).__mro__}
