"""The model families that run on the paged cache: what may stand where in such a model, and what it computes.

Checked against transformers 5.17 to 5.24. A family's modeling file is imported only once such a model is met.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple

# By attribute name: classes that may stand there, without the family's prefix. Modules of other names are called on
# packed tokens as well, and have to be layers that work token by token (linear, embedding, LoRA, quantized).
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


def _module_name(package: str) -> str:
    return f"transformers.models.{package}.modeling_{package}"


class Wrapper(NamedTuple):
    """An image-text model whose `model.language_model` is the decoder of a family: calls with text alone run there.

    Its head's product is the logits, whatever the family makes of it elsewhere.
    """

    package: str  # under transformers.models
    prefix: str  # of its classes' names

    @property
    def model_name(self) -> str:
        """Name of the class that generates."""
        return f"{self.prefix}ForConditionalGeneration"

    @property
    def module_name(self) -> str:
        """Name of the modeling file's module."""
        return _module_name(self.package)

    @property
    def modeling(self) -> ModuleType:
        """The modeling file's module."""
        return importlib.import_module(self.module_name)

    @property
    def body(self) -> type:
        """Class of its `model`, which holds the decoder beside the vision tower."""
        body: type = getattr(self.modeling, f"{self.prefix}Model")
        return body


class Family(NamedTuple):
    """What the adapters have to know of a family besides its modules."""

    package: str  # under transformers.models
    prefix: str  # of its classes' names
    parts: Mapping[str, tuple[str, ...]] = _LLAMA
    # Where stock's masks have a sliding window: nowhere, in all layers, or in those whose layer_type says so.
    windows: Literal["none", "all", "by layer"] = "none"
    # What its attention passes to the implementation and sdpa would leave out.
    beyond_sdpa: Literal["softcap", "s_aux"] | None = None
    # What becomes of the head's product: nothing, config.final_logit_softcapping, division by config.logits_scaling.
    logits: Literal["plain", "capped", "divided"] = "plain"
    casts_norms: bool = False  # norms with fp32 weights hand on their input's dtype
    fused: bool = False  # layers run by hf_paged's own code and kernels, not by their own
    wrapper: Wrapper | None = None  # the image-text model that the decoder is inside of

    @property
    def model_name(self) -> str:
        """Name of the causal LM's class."""
        return f"{self.prefix}ForCausalLM"

    @property
    def module_name(self) -> str:
        """Name of the modeling file's module."""
        return _module_name(self.package)

    @property
    def modeling(self) -> ModuleType:
        """The modeling file's module."""
        return importlib.import_module(self.module_name)

    @property
    def model_class(self) -> type:
        """Class of the whole model: the wrapper's where there is one."""
        holder = self.wrapper or self
        kind: type = getattr(holder.modeling, holder.model_name)
        return kind

    def classes(self, part: str) -> tuple[type, ...]:
        """Classes that may stand at an attribute of this name; () where the family has no such part."""
        return tuple(getattr(self.modeling, self.prefix + name) for name in self.parts.get(part, ()))

    def class_names(self) -> list[str]:
        """Names of all classes of the modeling file that may stand in a model, the causal LM's among them."""
        return [self.model_name, *sorted({self.prefix + name for names in self.parts.values() for name in names})]


FAMILIES = (
    Family("qwen3", "Qwen3", windows="by layer", parts={**_LLAMA, **_HEAD_NORMS}, fused=True),
    Family("qwen3_moe", "Qwen3Moe", windows="all", fused=True, parts={
        **_LLAMA, **_HEAD_NORMS, **_EXPERTS, "mlp": ("SparseMoeBlock", "MLP"),
    }),
    Family("llama", "Llama", fused=True),
    Family("mistral", "Mistral", windows="all"),
    Family("qwen2", "Qwen2", windows="by layer"),
    Family("gemma2", "Gemma2", windows="by layer", beyond_sdpa="softcap", logits="capped",
           parts={**_LLAMA, **_OUTER_NORMS, **_SCALED_EMBEDDING}),
    Family("gemma3", "Gemma3", windows="by layer", logits="capped",
           parts={**_LLAMA, **_OUTER_NORMS, **_SCALED_EMBEDDING, **_HEAD_NORMS, "model": ("TextModel",)}),
    Family("phi3", "Phi3", windows="all"),
    Family("olmo2", "Olmo2", parts={**_POST_NORMS, **_HEAD_NORMS}),
    Family("gpt_oss", "GptOss", windows="by layer", beyond_sdpa="s_aux", casts_norms=True,
           parts={**_LLAMA, "experts": ("Experts",), "router": ("TopKRouter",)}),
    Family("smollm3", "SmolLM3", windows="by layer"),
    Family("granite", "Granite", logits="divided"),
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


def family_of(model: Any) -> Family | None:
    """The family of the class of `model` or of one it derives from, or of what it wraps, or None. Imports nothing."""
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
            return family._replace(wrapper=wrapper, logits="plain", fused=False)
    return None


def _class_names(model: Any) -> set[tuple[str, str]]:
    return {(cls.__module__, cls.__name__) for cls in type(model).__mro__}
