"""Read what torch's profiler recorded of a GPU."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch


class GpuTrace(NamedTuple):
    """``kernels``: calls and microseconds by name, the longest first; microseconds in which any ran, and in all."""

    kernels: dict[str, tuple[int, float]]
    busy_us: float
    whole_us: float


def gpu_trace(trace: Any) -> GpuTrace:
    """Of a profile that has ended. Kernels that run beside each other count both, but once as busy."""
    kernels: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    spans = []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, us = kernels[event.name]
            kernels[event.name] = count + 1, us + event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))
    busy, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    longest_first = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return GpuTrace(longest_first, busy, end - min(spans)[0])
