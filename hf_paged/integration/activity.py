"""What an engine did between two looks at its counters, as figures for progress bars and loggers."""

from __future__ import annotations

from typing import NamedTuple

from hf_paged.outputs import EngineStats


class Activity(NamedTuple):
    """Of the time between two looks, but for what is true at the second one.

    Attributes:
        prefill_per_second, generated_per_second: prompt tokens computed, and tokens made.
        num_running, num_waiting: requests at the second look.
        kv_used: share of the KV blocks that requests use at the second look.
        hit_rate: share of the prompt tokens looked up in the prefix cache that were found.
        num_preemptions: requests that had to give their blocks back.
    """

    prefill_per_second: float
    generated_per_second: float
    num_running: int
    num_waiting: int
    kv_used: float
    hit_rate: float
    num_preemptions: int


def activity(before: EngineStats, now: EngineStats, seconds: float) -> Activity:
    """What happened in these seconds, more than none."""
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return Activity(
        prefill_per_second=(now.num_prefill_tokens - before.num_prefill_tokens) / seconds,
        generated_per_second=(now.num_generated_tokens - before.num_generated_tokens) / seconds,
        num_running=now.num_running, num_waiting=now.num_waiting,
        kv_used=now.num_used_blocks / max(now.num_blocks - 1, 1),
        hit_rate=hits / queries if queries else 0.0,
        num_preemptions=now.num_preemptions - before.num_preemptions,
    )
