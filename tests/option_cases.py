"""Values of every option of a `GenerationConfig` that show in what a tiny model of 256 tokens makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import batch, byte_tokenizer
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
SAMPLE = {"do_sample": True, "top_k": 50}
# The first tokens that stock's `tiny_model()` makes of `batch([20, 13, 5])`; tests/options/test_every_option.py checks.
FREE = [[198, 99, 41, 83], [108, 107, 179, 181], [143, 214, 70, 248]]
SECOND = FREE[0][1]  # an EOS that ends a row early
# Of every option a value that is not neutral, and what else it takes to have an effect. Draws are left no choice, so
# that stock, whose random numbers are others, makes the same tokens. Prompts are those of `batch([20, 13, 5])`.
VALUES: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 29, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 5},
    "min_length": {"min_length": 30, "eos_token_id": SECOND},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": SECOND},
    "eos_token_id": {"eos_token_id": SECOND},
    "pad_token_id": {"pad_token_id": 33, "eos_token_id": SECOND},
    "num_beams": {"num_beams": 3},
    "max_time": {"max_time": 1e-9, "eos_token_id": 255},
    "stop_strings": {"stop_strings": "J", "tokenizer": byte_tokenizer(), "eos_token_id": 255},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [FREE[0][:1], FREE[1][1:3]]},
    "forced_bos_token_id": {"forced_bos_token_id": 8},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 55},
    "suppress_tokens": {"suppress_tokens": [row[0] for row in FREE]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [row[0] for row in FREE]},
    "sequence_bias": {"sequence_bias": {(17,): 1e4}},
    "guidance_scale": {"guidance_scale": 3.0},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=50.0)},
    "num_return_sequences": {"num_return_sequences": 2, **SAMPLE, "top_k": 1},
    "typical_p": {"typical_p": 0.01, **SAMPLE},
    "top_h": {"top_h": 0.01, **SAMPLE},
    "epsilon_cutoff": {"epsilon_cutoff": 0.5, **SAMPLE},
    "eta_cutoff": {"eta_cutoff": 0.9, **SAMPLE, "temperature": 0.02},
    "num_beam_groups": {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5},
    "constraints": {"constraints": [3], "num_beams": 2},
    "force_words_ids": {"force_words_ids": [[3]], "num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "length_penalty": {"length_penalty": -5.0, "num_beams": 3, "eos_token_id": SECOND},
    "do_sample": {**SAMPLE, "temperature": 1e-5, "num_return_sequences": 2},
}
# These change at most how stock comes to its tokens, or only what it returns besides them.
QUIET: dict[str, dict[str, Any]] = {
    "temperature": {**SAMPLE, "temperature": 1e-5},
    "top_k": {**SAMPLE, "top_k": 1},
    "top_p": {**SAMPLE, "top_p": 1e-6, "top_k": 0},
    "min_p": {**SAMPLE, "min_p": 1.0, "top_k": 0},
    "early_stopping": {"early_stopping": True, "num_beams": 2},
    "cache_config": {"cache_config": {"max_cache_len": 64}, "cache_implementation": "static"},
    "max_cache_len": {"max_cache_len": 64, "cache_implementation": "static"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    **{name: {name: value} for name, value in {
        "use_mtp": True, "use_cache": False, "cache_implementation": "static", "renormalize_logits": True,
        "remove_invalid_values": True, "token_healing": True, "return_dict_in_generate": True, "output_scores": True,
        "output_logits": True, "bos_token_id": 4, "decoder_start_token_id": 4, "is_assistant": True,
        "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9,
        "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2, "assistant_early_exit": 1,
        "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5,
        "speculation_type": "dflash", "compile_config": CompileConfig(backend="eager"), "disable_compile": True,
        "continuous_batching_config": {"block_size": 32}, "low_memory": True, "diversity_penalty": 0.5,
        "prefill_chunk_size": 4, "transformers_version": "4.0.0",
    }.items()},
}
ONE_ROW = ("prompt_lookup_num_tokens", "assistant_early_exit")  # that stock takes


def options_of(name: str) -> dict[str, Any]:
    """Arguments of `generate` in which the option shows."""
    if name == "assistant_early_exit" and transformers.__version__.startswith("5.17."):
        pytest.skip("stock 5.17 raises half-way through early exit and leaves the model with fewer layers")
    given = {"max_new_tokens": 10} | (VALUES | QUIET)[name]
    return {key: value for key, value in given.items() if value is not None}


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Prompts for `options_of`."""
    if name == "forced_bos_token_id":  # whose processor acts behind a prompt of one token
        return {"input_ids": torch.tensor([[5]])}
    return batch([20] if name in ONE_ROW else [20, 13, 5])


SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 1.2}
EOS = list(range(3, 256, 17))  # some 6 % of the vocabulary: most outputs meet one
# Every native option, set to something that shows in tokens that the engine draws, and options that it needs.
CASES: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 40},
    "max_new_tokens": {"max_new_tokens": 9},
    "min_length": {"min_length": 26, "eos_token_id": EOS, "max_new_tokens": 30},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": EOS},
    "do_sample": SAMPLED,
    "temperature": {**SAMPLED, "temperature": 2.5},
    "top_k": {**SAMPLED, "top_k": 7},
    "top_p": {**SAMPLED, "top_p": 0.7},
    "min_p": {**SAMPLED, "min_p": 0.1},
    "eos_token_id": {"eos_token_id": EOS},
    "pad_token_id": {"pad_token_id": 9, "eos_token_id": EOS},
    "num_return_sequences": {**SAMPLED, "num_return_sequences": 3},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5, "max_new_tokens": 24},
    "max_time": {"max_time": 1000.0},
    "stop_strings": {**SAMPLED, "stop_strings": [chr(c) for c in range(33, 127, 3)], "max_new_tokens": 24},
    "sequence_bias": {**SAMPLED, "sequence_bias": [[[21], 3.0], [[21, 22], 8.0], [[21, 22, 23], 9.0]]},
    "repetition_penalty": {**SAMPLED, "repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "sequence_bias": [[[21], 60.0], [[22], 59.0]]},
    "bad_words_ids": {**SAMPLED, "bad_words_ids": [[t] for t in range(60, 160)] + [[21, 22]]},
    "forced_bos_token_id": {"forced_bos_token_id": 77},
    "forced_eos_token_id": {"forced_eos_token_id": 78},
    "remove_invalid_values": {**SAMPLED, "remove_invalid_values": True},
    "exponential_decay_length_penalty": {**SAMPLED, "exponential_decay_length_penalty": (5, 1.6), "eos_token_id": 4,
                                         "max_new_tokens": 24},
    "suppress_tokens": {**SAMPLED, "suppress_tokens": list(range(100, 200))},
    "begin_suppress_tokens": {**SAMPLED, "begin_suppress_tokens": list(range(30, 256))},
    "renormalize_logits": {"renormalize_logits": True},
    "typical_p": {**SAMPLED, "typical_p": 0.6},
    "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 0.01},
    "eta_cutoff": {**SAMPLED, "eta_cutoff": 0.4},
}
