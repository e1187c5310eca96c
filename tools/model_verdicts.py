"""Prove each decoder class of the installed transformers with its default config; compare with accepted verdicts.

    python tools/model_verdicts.py [--only NAME ...] [--write]

`tests/models/proof/verdicts.json` has the accepted outcome, limit and reason by class name, and the version of
transformers; `--write` replaces those of the classes that ran, and drops classes that are no more. A class that is
proved and whose models cannot be laid out on pages counts as refused. Image-text classes, which are proved with text
alone, have a list of their own. Exits with 1 if a verdict is another one. All classes take about 8 minutes of one
core. Behind it, `python tools/models_page.py` renews the page of models.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_paged.models.derivation.layout import lay_out
from hf_paged.models.derivation.rows_in_dtype import Precision, check_rows_in
from hf_paged.models.derivation.two_halves import check_two_halves
from hf_paged.models.proof import Verdict, prove
from hf_paged.models.proof.prove import in_thread
from hf_paged.models.proof.verdict import Refused

ACCEPTED = Path(__file__).resolve().parents[1] / "tests" / "models" / "proof" / "verdicts.json"
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_AXES: dict[str, Any] = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [16, 24, 24]}}}
_HALF_AXES: dict[str, Any] = {
    "text_config": {"rope_parameters": _ROPE | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}}
_VISION_TOKENS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
# What default configs lack.
MISSING: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27]},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "Dots1ForCausalLM": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "Glm46VForConditionalGeneration": {"text_config": {"model_type": "glm4v_text", **_HALF_AXES["text_config"]}},
    "Glm4vForConditionalGeneration": _HALF_AXES,
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, **_HALF_AXES["text_config"]}},
    "GlmOcrForConditionalGeneration": {"text_config": {"head_dim": 128, **_AXES["text_config"]}},
    "GraniteMoeHybridForCausalLM": {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 4},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"] * 8}},
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"num_key_value_heads": 48},
    "PaddleOCRVLForConditionalGeneration": _AXES,
    "Qwen2VLForConditionalGeneration": _AXES,
    "Qwen2_5OmniThinkerForConditionalGeneration": _AXES | _VISION_TOKENS,
    "Qwen2_5_VLForConditionalGeneration": _AXES,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _VISION_TOKENS | {"text_config": {
        "head_dim": 128, "rope_parameters": _ROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}}},
}


def class_names() -> list[str]:
    """Return the names of the causal LM classes, each once."""
    return _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_names() -> list[str]:
    """Return the names of the image-text classes that are no causal LM classes, each once."""
    return sorted(set(_names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)) - set(class_names()))


def _names(mapping: Mapping[str, Any]) -> list[str]:
    return sorted({name for one in mapping.values() for name in ((one,) if isinstance(one, str) else one)})


def config_of(name: str) -> PreTrainedConfig:
    """Return the default config of a class, as a decoder."""
    config: PreTrainedConfig = getattr(transformers, name).config_class(**MISSING.get(name, {}))
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def verdict_of(name: str) -> dict[str, Any]:
    """Prove a class with its default config, and with the attention that stock takes for it."""
    try:
        cls, config = getattr(transformers, name), config_of(name)
        with torch.device("meta"):
            attention = cls(cls.config_class(**config.to_diff_dict())).config._attn_implementation
    except Exception as error:
        return {"outcome": "refused", "max_length": None, "reason": f"its default config makes no model: "
                f"{type(error).__name__}"}
    verdict = prove(cls, config, attention)
    if verdict.outcome == "proved":
        verdict = in_thread(lambda: _laid_out(cls, config, attention, verdict))
    return {"outcome": verdict.outcome, "max_length": verdict.max_length, "reason": verdict.reason}


def _laid_out(cls: type, config: PreTrainedConfig, attention: str, verdict: Verdict) -> Verdict:
    """Return the verdict, or why models of a proved class do not run on pages."""
    try:
        lay_out(cls, config)
        check_two_halves(cls, config, attention)
        check_rows_in(Precision((("", torch.float32),)), cls, config, attention)
    except Refused as refusal:
        return Verdict("refused", str(refusal))
    except Exception as error:
        return Verdict("refused", f"its layout cannot be read ({type(error).__name__})")
    return verdict


def verdicts(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        yield name, verdict_of(name)


def accepted(kind: str = "classes") -> dict[str, dict[str, Any]]:
    """Return the accepted verdicts by class name; of ``image_text`` classes those of calls with text alone."""
    return json.loads(ACCEPTED.read_text())[kind]


def accepted_version() -> str:
    """Return the version of transformers that the accepted verdicts are about."""
    return json.loads(ACCEPTED.read_text())["transformers"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of classes")
    parser.add_argument("--write", action="store_true", help="accept the verdicts")
    arguments = parser.parse_args()
    names = [name for name in class_names() + image_text_names()
             if not arguments.only or any(part in name for part in arguments.only)]
    before, found = accepted() | accepted("image_text"), {}
    for name, verdict in verdicts(names):
        found[name] = verdict
        sign = " " if before.get(name) == verdict else "*"
        limit = f" to {verdict['max_length']}" if verdict["max_length"] else ""
        print(f"{sign} {name}: {verdict['outcome']}{limit} {verdict['reason']}", flush=True)
    if arguments.write:
        known = before | found
        made = {"transformers": transformers.__version__,
                "classes": {name: known[name] for name in class_names()},
                "image_text": {name: known[name] for name in image_text_names()}}
        ACCEPTED.write_text(json.dumps(made, indent=1) + "\n")
    return int(any(before.get(name) != verdict for name, verdict in found.items()) and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
