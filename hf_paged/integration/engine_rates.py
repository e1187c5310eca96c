"""Rates of an engine between two readings of its counters, for progress bars and loggers."""

from __future__ import annotations

from typing import NamedTuple

from hf_paged.outputs import EngineStats


class EngineRates(NamedTuple):
    """Rates between two readings, and values at the second one.

    Attributes:
        prefill_per_second, generated_per_second: Prompt tokens computed, and tokens generated.
        num_running, num_waiting: Requests at the second reading.
        kv_used: Share of the KV blocks in use at the second reading.
        hit_rate: Share of looked-up prompt tokens that were in the prefix cache.
        num_preemptions: Number of preemptions.
    """

    prefill_per_second: float
    generated_per_second: float
    num_running: int
    num_waiting: int
    kv_used: float
    hit_rate: float
    num_preemptions: int


def activity(before: EngineStats, now: EngineStats, seconds: float) -> EngineRates:
    """Compute the rates between two readings; `seconds` must be positive."""
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return EngineRates(
        prefill_per_second=(now.num_prefill_tokens - before.num_prefill_tokens) / seconds,
        generated_per_second=(now.num_generated_tokens - before.num_generated_tokens) / seconds,
        num_running=now.num_running, num_waiting=now.num_waiting,
        kv_used=now.num_used_blocks / max(now.num_blocks - 1, 1),
        hit_rate=hits / queries if queries else 0.0,
        num_preemptions=now.num_preemptions - before.num_preemptions,
    )
