"""Compile the kernels of packed prompts for a Hopper GPU that is not there; prints the names of those that fail."""

from __future__ import annotations

from functools import partial

import packed_mamba2_cases
import torch
from packed_cases import packed

from hf_paged.kernels.build import absent_gpu
from hf_paged.kernels.build.compiling import compiled_before
from hf_paged.kernels.recurrent.gated_rms_norm import gated_rms_norm_triton
from hf_paged.kernels.recurrent.grouped_rms_norm import grouped_rms_norm_triton
from hf_paged.kernels.recurrent.packed_convolution import packed_convolution_triton
from hf_paged.kernels.recurrent.packed_delta_rule import packed_delta_rule_triton
from hf_paged.kernels.recurrent.packed_mamba2 import packed_mamba2_triton

if __name__ == "__main__":
    works = []
    for counts in ((1,), (16,), (1, 70)):  # Triton compiles another kernel for a number that is 1, or a multiple of 16
        case = packed(torch.bfloat16, counts=counts, earlier=(2,) * len(counts), heads=1, group=1)
        mixed, out = torch.zeros(sum(counts), 64, dtype=torch.bfloat16), torch.zeros_like(case.gate).flatten(1, 2)
        works += [partial(packed_convolution_triton, case.parts, case.weight, None, case.conv, case.rows),
                  partial(packed_delta_rule_triton, mixed, case.gates, case.recurrent, case.rows),
                  partial(gated_rms_norm_triton, out, case.gate, case.weight.flatten()[:32], 1e-6)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = packed_mamba2_cases.packed(dtype, counts=(3, 20), earlier=(0, 1), heads=8, groups=1, dim=64, size=128)
        x, gate = torch.zeros(20, 512), torch.zeros(20, 512, dtype=dtype)
        works += [partial(packed_mamba2_triton, *case), partial(grouped_rms_norm_triton, x, gate, gate[0], 1, 1e-6)]
    absent_gpu.pretend(absent_gpu.gpu_model(90))
    with absent_gpu.CountsAsGpu():
        print("failed:", compiled_before(works, is_complete=True), "compiled:", len(works))
