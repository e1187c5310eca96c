"""Default configs of usual classes, and what tests expect of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from transformers import PreTrainedConfig


class Known(NamedTuple):
    """A class of causal LMs by the prefix of its name."""

    prefix: str
    windows: str = "none"  # layers whose masks have a window: "none", "all" or "by layer"
    beyond_sdpa: str | None = None  # what its attention passes on that sdpa ignores
    missing: dict[str, Any] = {}  # noqa: RUF012  that its default config lacks

    @property
    def model_class(self) -> Any:
        return getattr(transformers, f"{self.prefix}ForCausalLM")

    def config(self, **overrides: Any) -> PreTrainedConfig:
        return self.model_class.config_class(**(self.missing | overrides))

    @property
    def attention(self) -> str:
        """The implementation that stock takes."""
        return "eager" if self.beyond_sdpa else "sdpa"


KNOWN = {one.prefix: one for one in (
    Known("Qwen3", "by layer"), Known("Qwen3Moe", "all"), Known("Llama"), Known("Mistral", "all"),
    Known("Qwen2", "by layer"), Known("Gemma2", "by layer", "softcap"), Known("Gemma3", "by layer"),
    Known("Phi3", "all"), Known("Olmo2"), Known("GptOss", "by layer", "s_aux"), Known("SmolLM3", "by layer"),
    Known("Granite"), Known("Glm"), Known("Glm4"), Known("Mixtral", "all"), Known("Olmo3", "by layer"),
    Known("Ministral", "by layer", missing={"head_dim": 128}), Known("Ministral3", "all"),
)}
