"""Every native option of a GenerationConfig, set so that it shows, for prompts of a tiny model of 256 tokens."""

from __future__ import annotations

from typing import Any

SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 1.2}
EOS = list(range(3, 256, 17))  # some 6 % of the vocabulary: most outputs meet one
# Every native option, set to something that shows in the tokens, and options that it needs.
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
