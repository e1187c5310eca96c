"""Tables of what to write in place of vLLM's names, and messages about these and misspelt names.

docs/from_vllm.md has the same tables with more words; a test compares the names.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_PAGE = "docs/from_vllm.md"
_NO_SUCH = "leave it out: there is no such thing here"

# Fields of vLLM's SamplingParams, and arguments of its LLM.generate and LLM.chat, with another name in hf_paged.
SAMPLING: dict[str, str] = {
    "n": "write num_return_sequences=, with do_sample=True for more than one",
    "max_tokens": "write max_new_tokens=",
    "min_tokens": "write min_new_tokens=",
    "stop": "write stop_strings=",
    "bad_words": "write bad_words_ids=, lists of token ids",
    "ignore_eos": "write eos_token_id=-1",
    "logit_bias": "write sequence_bias={(token_id,): bias}",
    "allowed_token_ids": "write suppress_tokens=, those that are not allowed",
    "structured_outputs": "write structured={'json_schema' | 'regex' | 'choice' | 'grammar': ...}",
    "guided_decoding": "write structured={'json_schema' | 'regex' | 'choice' | 'grammar': ...}",
    "guided_json": "write structured={'json_schema': ...}",
    "guided_regex": "write structured={'regex': ...}",
    "guided_choice": "write structured={'choice': [...]}",
    "guided_grammar": "write structured={'grammar': ...}",
    "logits_processors": "call model.generate(logits_processor=...) of the enabled model",
    "truncate_prompt_tokens": "cut the prompt's token ids: prompt[-k:]",
    "detokenize": "leave it out; a PagedGenerator without a tokenizer makes no text",
    "output_kind": "call generate for whole outputs, or stream for what is new",
    "spaces_between_special_tokens": _NO_SUCH,
    "flat_logprobs": _NO_SUCH,
    "extra_args": _NO_SUCH,
    "use_beam_search": "call model.generate(num_beams=...) of the enabled model",
    "beam_width": "call model.generate(num_beams=...) of the enabled model",
    "sampling_params": "write its fields as arguments: max_new_tokens=, do_sample=True, temperature=, ...",
    "prompt_token_ids": "write prompts=: token ids are prompts",
    "request_id": "write request_ids=",
    "lora_request": "write adapter_names=, of adapters that load_adapter gave the model",
    "prompt_adapter_request": _NO_SUCH,
    "chat_template_content_format": "leave it out: parts go to the template, or as text where it fails on them",
    "mm_processor_kwargs": "write chat_template_kwargs={'processor_kwargs': {...}}",
    "tokenization_kwargs": "write chat_template_kwargs={'truncation': True, 'max_length': n} for chats, or give the "
                           "ids that the tokenizer makes with them",
}

# Arguments of vLLM's LLM with another name in hf_paged, or none.
LOADING: dict[str, str] = {
    "tokenizer_mode": "write tokenizer=, an object that you have loaded",
    "tokenizer_revision": "write tokenizer=, an object that you have loaded",
    "skip_tokenizer_init": "leave it out; PagedGenerator(model) takes a model without a tokenizer",
    "allowed_local_media_path": "leave it out: chats may name any file",
    "limit_mm_per_prompt": "leave it out: chats may have any number of images; hf-paged serve has --max-images",
    "quantization": "leave it out for a checkpoint that is quantized; quantization_config= quantizes at loading",
    "load_format": "leave it out: safetensors and PyTorch files are recognised",
    "download_dir": "write cache_dir=",
    "hf_token": "write token=",
    "hf_overrides": "write fields of the model's config as arguments",
    "max_seq_len_to_capture": "leave it out: CUDA graphs do not depend on lengths",
    "swap_space": "leave it out: preempted requests are computed again",
    "cpu_offload_gb": _NO_SUCH,
    "num_gpu_blocks_override": "write num_blocks=",
    "kv_cache_memory_bytes": "write num_blocks=, or gpu_memory_utilization=",
    "kv_cache_dtype": "leave it out: keys and values have the dtype that the model computes in",
    "disable_custom_all_reduce": "write all_reduce='nccl'",
    "enable_chunked_prefill": "leave it out: prompts are always computed in chunks of max_num_batched_tokens",
    "scheduling_policy": "leave it out: priority= of generate decides, then the order of arrival",
    "async_scheduling": "write overlap=",
    "enable_return_routed_experts": "write routed_experts=",
    "compilation_config": "leave it out; enforce_eager=True captures no CUDA graphs",
    "speculative_config": "write prompt_lookup_num_tokens= of generate",
    "num_speculative_tokens": "write prompt_lookup_num_tokens= of generate",
    "guided_decoding_backend": "leave it out: structured= of generate is compiled by xgrammar",
    "structured_outputs_config": "leave it out: structured= of generate is compiled by xgrammar",
    "enable_lora": "leave it out: load_adapter(name, path) of the generator takes adapters at any time",
    "lora_modules": "call load_adapter(name, path) of the generator",
    "max_loras": "leave it out: any number of adapters may share a step",
    "max_lora_rank": "leave it out: an adapter may have any rank",
    "max_cpu_loras": "leave it out: adapters lie with the model",
    "fully_sharded_loras": "leave it out: adapters are sharded as their layers are",
    "pipeline_parallel_size": "write tensor_parallel_size= of PagedGenerator.from_pretrained",
    "data_parallel_size": "run one process a GPU, or hf_paged.ray_data (docs/data_parallel.md)",
    "enable_expert_parallel": _NO_SUCH,
    "distributed_executor_backend": "leave it out: ranks are processes of one machine",
    "served_model_name": _NO_SUCH,
    "task": "leave it out: causal language models generate",
    "runner": "leave it out: causal language models generate",
    "convert": "leave it out: causal language models generate",
    "model_impl": "leave it out: models are transformers' own",
    "pooler_config": "leave it out: causal language models generate",
    "override_generation_config": "write generation settings as arguments of generate",
    "logprobs_mode": "write logprobs='raw' or 'processed' of generate",
    "max_logprobs": "leave it out: top_logprobs= takes up to 128",
    "enable_sleep_mode": "leave it out: engine.release_memory() gives the KV pool back at any time",
    "disable_log_stats": "leave it out: nothing is logged; engine.stats() has counters",
}

# Methods of vLLM's LLM that a PagedGenerator lacks.
METHODS: dict[str, str] = {
    "chat": "generate(chats, ...): a chat, which is a list of messages, is a prompt like any other",
    "beam_search": "generator.model.generate(num_beams=...)",
    "score": "a forward of the model, generator.model(**inputs); log-probabilities of given tokens are "
             "generate(..., max_new_tokens=0, prompt_logprobs=True)",
    "embed": "a forward of the model, generator.model(**inputs, output_hidden_states=True)",
    "encode": "a forward of the model, generator.model(**inputs, output_hidden_states=True)",
    "classify": "a forward of the model, generator.model(**inputs)",
    "reward": "a forward of the model, generator.model(**inputs)",
    "apply_model": "generator.model, the model itself",
    "collective_rpc": "load_weights and load_adapter, which reach all ranks; there are no calls of other functions",
    "sleep": "generator.engine.release_memory()",
    "wake_up": "the next call: what release_memory() gave back comes by itself",
    "get_tokenizer": "generator.tokenizer",
    "set_tokenizer": "generator.tokenizer = tokenizer",
    "get_default_sampling_params": "generator.model.generation_config",
    "get_metrics": "generator.metrics() or generator.engine.stats()",
    "llm_engine": "generator.engine",
    "reset_prefix_cache": "generator.engine.reset_prefix_cache()",
    "start_profile": "with hf_paged.trace(path): ...",
    "stop_profile": "with hf_paged.trace(path): ...",
}


def unknown_names(given: Mapping[str, Any], accepted: Collection[str], vllm: Mapping[str, str],
                  elsewhere: Mapping[str, Collection[str]], expected: str) -> str:
    """Return the message about arguments that a function does not take.

    Args:
        given: the arguments.
        accepted: names that the function takes.
        vllm: what to write in place of names of vLLM's function.
        elsewhere: names that other functions take, by function.
        expected: text for a name that resembles none of `accepted`.
    """
    return "; ".join(f"{name}={given[name]!r:.80}: {_answer(name, accepted, vllm, elsewhere, expected)}"
                     for name in sorted(given))


def _answer(name: str, accepted: Collection[str], vllm: Mapping[str, str], elsewhere: Mapping[str, Collection[str]],
            expected: str) -> str:
    if name in vllm:
        return f"{vllm[name]} ({_PAGE})"
    for function, names in elsewhere.items():
        if name in names:
            return f"expected it as an argument of {function}"
    if name not in accepted and (near := difflib.get_close_matches(name, accepted, 1, 0.75)):
        return f"expected {near[0]}, or it left out"
    for table in (SAMPLING, LOADING):
        if name in table:
            return f"{table[name]} ({_PAGE})"
    return expected


def unknown_method(owner: str, name: str) -> str:
    """Return the message about an attribute that a class lacks; for a method of vLLM's LLM it names the substitute."""
    answer = f": vLLM's is here {METHODS[name]} ({_PAGE})" if name in METHODS else ""
    return f"{owner!r} object has no attribute {name!r}{answer}"
