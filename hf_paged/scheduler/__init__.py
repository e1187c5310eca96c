"""Selects the sequences of a step, their tokens and their cache blocks, with numpy and no other part of hf_paged."""

from hf_paged.scheduler.block_pool import BlockPool, KVBlock
from hf_paged.scheduler.kv_cache_manager import KVCacheManager
from hf_paged.scheduler.plan import CommitResult, SchedulerConfig, StepPlan
from hf_paged.scheduler.scheduler import Scheduler
from hf_paged.scheduler.sequence import Sequence, Status

__all__ = [
    "BlockPool",
    "CommitResult",
    "KVBlock",
    "KVCacheManager",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "Status",
    "StepPlan",
]
