"""Tiny random models of the causal LM classes of transformers, in two configurations that no proof is made with."""

from __future__ import annotations

from typing import Any

import transformers
from family_models import make_random
from recurrent_models import CLASSES, recurrent_model
from support import VOCAB
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.proof import reduced
from tools.model_verdicts import config_of

# Sizes in place of those of a proof's clone: more heads, or larger ones.
_WIDTHS = ({64: 96, 32: 48, 96: 112, 128: VOCAB}, {64: 128, 32: 64, 96: 160, 128: VOCAB, 16: 32, 8: 16, 24: 48})
_HEADS = ({4: 6, 2: 3}, {})
_EXPERTS = ({4: 6}, {4: 8})
_WINDOW, _POSITIONS = 20, 512
# What else a class needs.
FURTHER: dict[str, dict[str, Any]] = {
    "BlenderbotForCausalLM": {"decoder_layers": 2, "encoder_layers": 2, "num_hidden_layers": 2},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 3, "clip_qkv": 8.0}},
    "KimiLinearForCausalLM": {"num_experts_per_token": 2},
    "MoshiForCausalLM": {"sliding_window": 3000},  # stock sees more than its window, and the proof ends there
    "RecurrentGemmaForCausalLM": {"lru_width": 96},
    "RwkvForCausalLM": {"attention_hidden_size": 96},
    "XLMWithLMHeadModel": {"emb_dim": 96},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
}
# Classes of which stock itself runs no such model: configs that need more than sizes, or other inputs than tokens.
NOT_MADE = frozenset({
    "BltForCausalLM", "DoryForCausalLM", "Dots3NoteForCausalLM",
    "Gemma3nForConditionalGeneration", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    "HrmTextForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM",
    "MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "Qwen4ExpForCausalLM",
    "ReformerModelWithLMHead", "XLNetLMHeadModel", "Zamba2ForCausalLM", "xLSTMForCausalLM",
})
SLOWLY_PROVED = frozenset({"Gemma3nForCausalLM"})


def tiny_class_model(name: str, number: int) -> PreTrainedModel:
    """A random model of a class by its default config, but for sizes (0: more heads, 1: larger ones); of a class with a
    recurrent state, whose sizes depend on each other, a tiny one (1: whose head shares the embedding's weights)."""
    if (prefix := name.removesuffix("ForCausalLM")) in CLASSES:
        return recurrent_model(prefix, tie_word_embeddings=number == 1)
    config = reduced.reduced(config_of(name))
    values = _resized(config, config.to_dict(), number) | FURTHER.get(name, {})
    model = make_random(getattr(transformers, name), type(config)(**values))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def _resized(config: PreTrainedConfig, values: dict[str, Any], number: int) -> dict[str, Any]:
    found: dict[str, Any] = {"initializer_range": 0.2}
    for field, value in values.items():
        if isinstance(inner := vars(config).get(field), PreTrainedConfig):
            value = {"model_type": inner.model_type} | _resized(inner, value, number)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = _size(field, value, number)
        if field not in ("initializer_range", *reduced._DROPPED):
            found[field] = value
    return found | {"eos_token_id": None}


def _size(field: str, value: int, number: int) -> int:
    if field in reduced._HEADS + reduced._KEY_HEADS:
        return _HEADS[number].get(value, value)
    if field in reduced._POSITIONS:
        return _POSITIONS
    if ("window" in field or "chunk" in field) and value > _WINDOW:
        return _WINDOW
    if field.startswith(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
        return _EXPERTS[number].get(value, value)
    return _WIDTHS[number].get(value, value) if reduced.is_size(field) else value
