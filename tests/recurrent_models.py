"""Tiny random models with a recurrent state, and outlines that make them run without a proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import transformers
from family_models import SHAPE, make_random
from transformers import PreTrainedModel

from hf_paged.models.derivation.executor import OUTLINES, ModelOutline, constants_of
from hf_paged.models.derivation.layout import lay_out
from hf_paged.models.executor import KNOWN_LAYERS
from hf_paged.models.recurrent.view import HAS_IDIOM

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
MAMBA_1 = {"intermediate_size": 128, "state_size": 8, "time_step_rank": 8, "num_hidden_layers": 2}
NEMOTRON = {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 8,
            "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16, "num_hidden_layers": None}
# What a class needs besides sizes, by the prefix of its name.
CLASSES: dict[str, dict[str, Any]] = {
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "FalconMamba": MAMBA_1,
    "FalconH1": MAMBA | {"mamba_d_ssm": 128},
    "GraniteMoeHybrid": MAMBA | LOCAL_EXPERTS | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "Jamba": LOCAL_EXPERTS | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8,
                              "mamba_d_state": 8},
    "LaraMini": DELTA,
    "Lfm2": CONV,
    "Lfm2Moe": CONV | EXPERTS | {"num_dense_layers": 1},
    "Lfm3": CONV,
    "Mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": 2},
    "Mamba": MAMBA_1,
    "NemotronH": NEMOTRON,
    "OlmoHybrid": DELTA,
    "Qwen3Next": DELTA | EXPERTS,
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": DELTA | EXPERTS,
}
# Heads as published, for which there are kernels of packed prompts on a GPU.
_DELTA_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_BAMBA_HEADS = {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 128}
PUBLISHED_HEADS: dict[str, dict[str, Any]] = dict.fromkeys(CLASSES, _DELTA_HEADS) | {
    "Bamba": _BAMBA_HEADS, "GraniteMoeHybrid": _BAMBA_HEADS,
    "Mamba2": {"num_heads": 2, "head_dim": 64, "state_size": 128},
    "NemotronH": {"mamba_head_dim": 64, "ssm_state_size": 128}}
WHOLE_PROMPTS = ("FalconMamba", "Jamba", "Mamba")
CORE = ("Lfm2", "Qwen3Next", "Qwen3_5", "Mamba2", "NemotronH", "Bamba")


with_idiom = pytest.mark.skipif(not HAS_IDIOM, reason="an older transformers asks no other cache for states")


def recurrent_model(name: str, **settings: Any) -> PreTrainedModel:
    """A random model of a class; its layers of each kind are one or two."""
    cls = getattr(transformers, f"{name}ForCausalLM")
    values = SHAPE | {"num_hidden_layers": 3} | CLASSES[name] | settings
    config = cls.config_class(**{key: value for key, value in values.items() if value is not None})
    model = make_random(cls, config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def outlined(model: PreTrainedModel, whole_prompts: bool = False, *, tries_precisions: bool = False) -> PreTrainedModel:
    """Let hf_paged run this model by its layout, as behind a proof of its class.

    ``tries_precisions``: its clone shows for each precision what rows do in it.
    """
    whole_prompts |= type(model).__name__.removesuffix("ForCausalLM") in WHOLE_PROMPTS
    dtype = model.get_input_embeddings().weight.dtype
    layout = lay_out(type(model), model.config, dtype=dtype)
    called = frozenset(path for path, kind in layout.classes.items() if kind in KNOWN_LAYERS)
    OUTLINES[model] = ModelOutline(type(model), layout.body, layout.calls, layout.classes, layout.num_logits,
                                   layout.positions, layout.longest, constants_of(model, called), has_stock_cache=False,
                                   states=layout.states, whole_prompts=whole_prompts, dtype=dtype,
                                   precisions={} if tries_precisions else None)
    return model


def poison(engine: Any) -> None:
    """NaN in all slots: what no running row has written is never read."""
    for tensor in engine._core.runner.cache.states._tensors.values():
        tensor.fill_(float("nan"))


def run(engine: Any, config: Any, coming: Sequence[list[int]] = ()) -> dict[str, list[int]]:
    """All tokens by request; `coming` are prompts, with this config, of which each further step gets one."""
    prompts, tokens = list(coming), {}
    while engine.has_unfinished() or prompts:
        if prompts:
            engine.add_request(prompts.pop(0), config)
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens
