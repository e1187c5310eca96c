"""Names of Gluon that differ between versions of Triton."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from hf_paged.kernels._triton import triton

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
constexpr_function = getattr(gl, "constexpr_function", None) or triton.constexpr_function
