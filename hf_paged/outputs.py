"""What callers get back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """One finished request.

    Attributes:
        token_ids: generated tokens, the stopping EOS included, as in `model.generate`.
        text: `token_ids` decoded without special tokens; None where the engine has no tokenizer.
        finish_reason: "eos", "stop", "length", "abort" or "error".
        prompt_token_ids: the prompt as it was run.
        logprobs: None unless asked for: of every generated token, the log-probability under the distribution that it
            was drawn from (temperature, filters and barred EOS included; greedy: softmax of the logits, EOS barred).
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        error: None, or what went wrong where ``finish_reason == "error"``.
        prompt_logprobs: None unless asked for, or where the request ended before all of its prompt was computed: None
            for the first prompt token, then log p(token | tokens before it) from the raw logits.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    prompt_token_ids: list[int]
    logprobs: list[float] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one engine step brought for one request; ``completion`` and ``finish_reason`` only with its last.

    ``new_logprobs``: None unless asked for, one per new token, as in `Completion`.
    """

    request_id: str
    new_token_ids: list[int]
    new_text: str | None = None
    finish_reason: str | None = None
    completion: Completion | None = None
    new_logprobs: list[float] | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made (num_generated_tokens, ...) and its state now (num_running, ...).

    ``prefix_cache_queries`` and ``prefix_cache_hits`` count tokens; ``num_prefill_tokens`` the prompt tokens computed,
    ``kv_cache_bytes`` the memory of the KV pool, ``num_pool_growths`` how often it was enlarged;
    graphs, counted
    over the present pool, are dropped when memory that they point to moved.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_generated_tokens: int
    num_prefill_tokens: int
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    kv_cache_bytes: int
    num_pool_growths: int
    num_graphs_captured: int
    num_graphs_dropped: int
