"""Tiny random image-text models."""

from __future__ import annotations

from typing import Any

import transformers
from family_models import SHAPE, make_random
from recurrent_models import CONV, DELTA, EXPERTS
from support import VOCAB
from transformers import PreTrainedModel

IMAGE, VIDEO, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARE = _TOWER | {"image_size": 16, "patch_size": 4}
_CLIP = _SQUARE | {"model_type": "clip_vision_model", "projection_dim": 16}
_TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_STARTS = {"vision_start_token_id": START, "vision_end_token_id": END}
_GRID = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}


def _axes(sections: list[int], **further: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **further}}


_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
           "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
           "n_shared_experts": 1}
_STATES = DELTA | {"num_hidden_layers": 3} | _axes([4, 2, 2], mrope_interleaved=True, partial_rotary_factor=1.0)
_GEMMA4 = {"global_head_dim": 32, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"],
           "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
# By model: prefix of its classes, settings of the text, those of the tower, and further ones.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": ("Qwen2VL", _axes([2, 3, 3]), {"depth": 2, "embed_dim": 16, "hidden_size": 64, "num_heads": 2,
                                               "patch_size": 4, "mlp_ratio": 2}, _IDS | _STARTS),
    "qwen2.5-vl": ("Qwen2_5_VL", _axes([2, 3, 3]), _GRID | {"window_size": 16, "out_hidden_size": 64,
                                                           "fullatt_block_indexes": [1]}, _IDS | _STARTS),
    "qwen3-vl": ("Qwen3VL", _axes([4, 2, 2], mrope_interleaved=True), _GRID | {
        "depth": 3, "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }, _IDS | _STARTS),
    "qwen3.5": ("Qwen3_5", _STATES, _GRID | {"out_hidden_size": 64, "num_position_embeddings": 64}, _IDS | _STARTS),
    "qwen3.5-moe": ("Qwen3_5Moe", _STATES | EXPERTS, _GRID | {"out_hidden_size": 64, "num_position_embeddings": 64},
                    _IDS | _STARTS),
    "lfm2-vl": ("Lfm2Vl", CONV | {"num_hidden_layers": 3, "model_type": "lfm2"}, _TOWER | {
        "model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 4,
    }, {"image_token_id": IMAGE, "projector_hidden_size": 16, "downsample_factor": 2}),
    "lfm3-vl": ("Lfm3Vl", CONV | {"num_hidden_layers": 3, "model_type": "lfm3"}, _TOWER | {
        "num_key_value_heads": 1, "patch_size": 4, "layer_types": ["conv", "full_attention"],
    }, _IDS | _STARTS | {"projector_hidden_size": 16}),
    "minicpm-v-4.6": ("MiniCPMV4_6", DELTA | {"num_hidden_layers": 3, "model_type": "qwen3_5_text"}, _TOWER | {
        "image_size": 32, "patch_size": 4}, _IDS | {"insert_layer_id": 0}),
    "glm4v": ("Glm4v", _axes([2, 3, 3], partial_rotary_factor=1.0), _GRID | {"image_size": 32, "out_hidden_size": 64},
              _IDS | {"image_start_token_id": START, "image_end_token_id": END, "video_start_token_id": START - 2,
                      "video_end_token_id": START - 3}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, _SQUARE, {"image_token_id": IMAGE, "scale_factor": 2}),
    "idefics3": ("Idefics3", {"model_type": "llama"}, _SQUARE, {"image_token_id": IMAGE, "scale_factor": 2}),
    "internvl": ("InternVL", {"model_type": "qwen2"}, _TOWER | {"image_size": (16, 16), "patch_size": (4, 4)},
                 {"image_token_id": IMAGE, "image_seq_length": 4}),
    "gemma4": ("Gemma4", _GEMMA4, _TOWER | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2,
                                            "patch_size": 4, "position_embedding_size": 64},
               _IDS | {"audio_config": None, "audio_token_id": START - 2, "boi_token_id": START, "eoi_token_id": END}),
    "kimi-k2.5": ("Kimi_K25", {"model_type": "deepseek_v3"} | _LATENT, _TOWER | {
        "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8,
    }, _IDS | _STARTS | {"projection_hidden_size": 16}),
    "aya-vision": ("AyaVision", {"model_type": "cohere2", "sliding_window": 20}, _SQUARE | {
        "model_type": "siglip_vision_model"}, {"image_token_index": IMAGE}),
    "llava-onevision": ("LlavaOnevision", {"model_type": "qwen2"}, _SQUARE | {"model_type": "siglip_vision_model"},
                        {"image_token_index": IMAGE, "video_token_index": VIDEO, **_TILES}),
    "llava": ("Llava", {"model_type": "llama"}, _CLIP, {"image_token_index": IMAGE}),
    "llava-next": ("LlavaNext", {"model_type": "llama"}, _CLIP, {"image_token_index": IMAGE, **_TILES}),
    "qwen3-vl-moe": ("Qwen3VLMoe", EXPERTS | _axes([4, 2, 2], mrope_interleaved=True), _GRID | {
        "depth": 3, "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }, _IDS | _STARTS),
    "vip-llava": ("VipLlava", {"model_type": "llama"}, _CLIP, {"image_token_index": IMAGE,
                                                              "vision_feature_layers": [-1, -2]}),
    "cohere2-vision": ("Cohere2Vision", {"model_type": "cohere2", "sliding_window": 20}, _SQUARE | {
        "model_type": "siglip_vision_model"}, {"image_token_id": IMAGE}),
    "deepseek-vl": ("DeepseekVL", {"model_type": "llama"}, _SQUARE | {"model_type": "siglip_vision_model"},
                    {"image_token_id": IMAGE}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None}, _TOWER | {
        "model_type": "pixtral", "image_size": 32, "patch_size": 4, "head_dim": 8}, {"image_token_index": IMAGE}),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 20, "layer_types": [
        "sliding_attention", "full_attention"]}, _SQUARE | {"model_type": "siglip_vision_model",
                                                            "vision_use_head": False},
               {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END,
                "mm_tokens_per_image": 16}),
}
WITH_STATES = ("qwen3.5", "qwen3.5-moe", "lfm2-vl", "lfm3-vl", "minicpm-v-4.6")


def image_model(name: str, marks: dict[int, int] | None = None, **changed: Any) -> PreTrainedModel:
    """Return the model of this name; ``marks``: other ids in place of IMAGE, START, ...; ``changed``: settings of its
    text."""
    prefix, text, tower, further = MODELS[name]
    further = {key: (marks or {}).get(value, value) if isinstance(value, int) else value
               for key, value in further.items()}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=SHAPE | text | changed, vision_config=tower, tie_word_embeddings=False, **further)
    model = make_random(getattr(transformers, f"{prefix}ForConditionalGeneration"), config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model
