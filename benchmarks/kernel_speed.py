"""Compare the kernels with the card's limits: attention, towers, fused ops, products, experts, sampling, checksum.

    python benchmarks/kernel_speed.py [--out kernels.json] [--only experts] [--sweep]

On a GPU: TB/s of what has to be read and written against the bandwidth of a copy, TFLOP/s against a large GEMM, both
measured in the same run, and FlashAttention-2 as torch ships it for the prefill rows. Times are medians of CUDA-graph
replays, so launches do not count; calls rotate over caches larger than L2 together. ``--sweep`` tries tile shapes.
On a CPU: microseconds of the torch backend for the shapes of `benchmarks/ragged_cpu.py`. (Not named kernels.py: that
would hide the Hub's `kernels` package from transformers.)
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.plan_decode import plan_items
from hf_paged.attention.registry import paged_attention, resolve_backend
from hf_paged.kernels.attention.decode import DecodeConfig, config_of, cta_slots_of, paged_attention_decode
from hf_paged.kernels.attention.prefill import paged_attention_prefill
from hf_paged.kernels.attention.types import AttentionOptions, DecodeWork, PagedMetadata
from hf_paged.kernels.attention.windowed import Windows, windowed_attention
from hf_paged.kernels.dequantize_4bit import NestedScales, Packed4Bit
from hf_paged.kernels.experts.down import down, down_triton
from hf_paged.kernels.experts.gate_up import ExpertsConfig, gate_up, gate_up_triton
from hf_paged.kernels.experts.join import join_experts_add_rms_norm
from hf_paged.kernels.experts.route import new_arrivals, route
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.kernels.layer.linear import linear
from hf_paged.kernels.layer.linear_4bit import SCRATCH_BYTES, Packed4BitGroup, linear_4bit
from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache, qk_norm_rope_store
from hf_paged.kernels.layer.silu_mul import silu_mul
from hf_paged.kernels.layer.store_kv import store_kv
from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models.experts import ExpertsParts, read_experts
from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.table import SamplingTable

HEAD_DIM, KV_HEADS, BLOCK_SIZE = 128, 8, 16
# Blocks of experts by the model that has them: class and config.
BLOCKS: dict[str, tuple[Any, Any]] = {
    "Qwen3-30B-A3B": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
    "gpt-oss-20b": (GptOssMLP, GptOssConfig(
        hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4)),
    "Mixtral-8x7B": (MixtralSparseMoeBlock, MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2)),
}
TOWERS = (64, 64), (4096, 64), (64, 1024), (16, 4096)  # number of windows, tokens of each
EXPERT_ROWS = {"Qwen3-30B-A3B": (1, 2, 4, 8, 64, 256, 512, 2048, 8192), "gpt-oss-20b": (1, 8, 64, 256, 2048),
               "Mixtral-8x7B": (1, 8, 64, 256, 2048)}
L2_BYTES = 400 << 20

# rows, tokens, query heads; what FlashAttention-3 (vLLM's build) and a probe reach on an H200, TB/s (PEERS.md).
DECODE = [
    (256, 1024, 16, 3.89, 4.27),
    (256, 1024, 32, 3.89, 4.15),
    (64, 4096, 32, 4.23, 4.33),
    (16, 16384, 32, 4.26, 4.30),
    (8, 16384, 16, 4.06, 4.20),
    (32, 1024, 32, 3.12, 3.51),
    (1, 32768, 32, 3.01, 3.48),
    (8, 2048, 16, 2.44, 3.02),
    (1, 512, 16, None, None),
]
# rows, tokens, query heads; FlashAttention-3 on an H200, TFLOP/s.
PREFILL = [(28, 576, 16, 236), (16, 1024, 32, 442), (2, 8192, 32, 690), (1, 32768, 32, None)]
# New tokens behind 30,000 that are cached, 32 query heads.
CHUNKS = [2048, 8192]


class Inputs(NamedTuple):
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # enough of them that a call finds nothing in L2
    meta: PagedMetadata


def make_inputs(rows: int, length: int, heads: int, new: int) -> Inputs:
    """Rows of ``length`` tokens, the last ``new`` of them new, their blocks scattered over the pool."""
    per_row = -(-length // BLOCK_SIZE)
    shape = (rows * per_row + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool_bytes = 2 * 2 * rows * per_row * BLOCK_SIZE * KV_HEADS * HEAD_DIM
    count = max(2, -(-L2_BYTES // pool_bytes))
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    caches = [(torch.randn(shape, **kwargs), torch.randn(shape, **kwargs)) for _ in range(min(count, 200))]
    table = (torch.randperm(rows * per_row, device="cuda") + 1).int().view(rows, per_row)
    config = config_of(rows, KV_HEADS, HEAD_DIM, torch.bfloat16, table.device)
    meta = PagedMetadata(
        query_start=(torch.arange(rows + 1, device="cuda") * new).int(),
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        block_table=table,
        slots=torch.arange(rows, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((rows * new,), -1, device="cuda"),
        max_query_len=new,
        max_seq_len=length,
        work=decode_work(rows, length, config) if new == 1 else None,
    )
    return Inputs(torch.randn(rows * new, heads, HEAD_DIM, **kwargs), caches, meta)


def decode_work(rows: int, length: int, config: DecodeConfig) -> DecodeWork:
    """The plan of a step, as the runner makes it."""
    device = torch.device("cuda", torch.cuda.current_device())
    items = plan_items(np.full(rows, length), np.arange(rows), cta_slots_of(config, KV_HEADS, device))
    arrivals = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device=device)
    return DecodeWork(torch.from_numpy(items).to(device), arrivals)


def graph_time(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Seconds per call: the calls in turn in one CUDA graph of at least 20, median over replays."""
    repeats = -(-20 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be writing the inputs
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _, call in itertools.product(range(repeats), calls):
            call()
    times = []
    for i in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e-3 / (repeats * len(calls)))
    return statistics.median(times)


def attention_time(kernel: Callable[..., object], inputs: Inputs, **options: object) -> float:
    run = partial(kernel, options=AttentionOptions(HEAD_DIM**-0.5), **options)
    replays = 3 if inputs.meta.max_query_len * inputs.meta.max_seq_len > 1 << 25 else 15  # calls of milliseconds
    return graph_time([partial(run, inputs.q, k, v, inputs.meta) for k, v in inputs.caches], replays)


def ceilings() -> dict[str, float]:
    """Copy bandwidth (read + write) in TB/s and bf16 GEMM rate in TFLOP/s."""
    source = torch.randn(1 << 31, dtype=torch.bfloat16, device="cuda")
    # A kernel, not copy_: in a graph that becomes a memcpy node, which is slower than loads and stores.
    copy = 2 * 2 * source.numel() / graph_time([partial(torch.mul, source, 1, out=torch.empty_like(source))], 5) / 1e12
    del source
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    c = torch.empty_like(a)
    gemm = 2 * n**3 / graph_time([lambda: torch.mm(a, b, out=c)], 5) / 1e12
    return {"copy_tb_s": copy, "gemm_tflop_s": gemm}


def decode_rows(copy: float) -> Iterable[dict[str, Any]]:
    for rows, length, heads, fa3, probe in DECODE:
        inputs = make_inputs(rows, length, heads, 1)
        seconds = attention_time(paged_attention_decode, inputs)
        rate = 2 * 2 * rows * length * KV_HEADS * HEAD_DIM / seconds / 1e12
        yield {
            "row": f"decode {rows} x {length}, {heads}/{KV_HEADS}", "us": seconds * 1e6, "TB/s": rate,
            "of copy": rate / copy, "FA3": fa3, "probe": probe,
        }


def fa2_time(inputs: Inputs, length: int) -> float:
    """torch's FlashAttention-2 over contiguous K and V of the same sizes (it takes no block table)."""
    tokens = inputs.q.shape[0]
    starts = inputs.meta.query_start
    dense = [tuple(cache.view(-1, KV_HEADS, HEAD_DIM)[:tokens] for cache in pair) for pair in inputs.caches]

    def call(k: torch.Tensor, v: torch.Tensor) -> object:
        return torch.ops.aten._flash_attention_forward(
            inputs.q, k, v, starts, starts, length, length, 0.0, True, False, scale=HEAD_DIM**-0.5
        )

    return graph_time([partial(call, k, v) for k, v in dense])


def prefill_rows(gemm: float) -> Iterable[dict[str, Any]]:
    """The kernel that prompts take on this GPU, beside the plain one and FlashAttention-2."""
    backend = resolve_backend("auto", torch.device("cuda", torch.cuda.current_device()))
    for rows, length, heads, fa3 in PREFILL:
        inputs = make_inputs(rows, length, heads, length)
        rates = _prefill_rates(backend, inputs, rows, length, length, gemm)
        flops = 4 * heads * HEAD_DIM * rows * length * (length + 1) / 2
        fa2 = flops / fa2_time(inputs, length) / 1e12
        yield {"row": f"prefill {rows} x {length}, {heads}/{KV_HEADS}", **rates, "FA2 in torch": fa2,
               "x FA2": rates["TFLOP/s"] / fa2, "FA3": fa3}
    for new in CHUNKS:
        inputs = make_inputs(1, 30000 + new, 32, new)
        yield {"row": f"prefill {new} behind 30000, 32/{KV_HEADS}",
               **_prefill_rates(backend, inputs, 1, 30000 + new, new, gemm)}


def _prefill_rates(backend: AttentionBackend, inputs: Inputs, rows: int, length: int, new: int,
                   gemm: float) -> dict[str, Any]:
    flops = 4 * inputs.q.shape[1] * HEAD_DIM * rows * (new * (length - new) + new * (new + 1) / 2)
    seconds, plain = attention_time(backend.run, inputs), attention_time(paged_attention_prefill, inputs)
    rate = flops / seconds / 1e12
    return {"backend": backend.name, "us": seconds * 1e6, "TFLOP/s": rate, "of GEMM": rate / gemm,
            "plain": flops / plain / 1e12}


def tower_rows(copy: float, gemm: float) -> Iterable[dict[str, Any]]:
    """Attention of Qwen2.5-VL's tower, its windows and whole images, beside sdpa window by window: stock's calls, but
    without their time on the host."""
    heads, dim = 16, 80
    for count, length in TOWERS:
        packed = torch.randn(count * length, 3, heads, dim, dtype=torch.bfloat16, device="cuda")
        windows, parts = Windows(np.arange(count + 1) * length), packed[: min(count, 64) * length].split(length)

        def stock(parts: Sequence[torch.Tensor] = parts) -> None:
            for part in parts:
                q, k, v = part.permute(1, 2, 0, 3)[:, None].unbind(0)
                torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=dim**-0.5)

        seconds = graph_time([partial(windowed_attention, *packed.unbind(1), windows, dim**-0.5)])
        floor = max(4 * count * length**2 * heads * dim / gemm / 1e12, 4 * packed.nbytes / 3 / copy / 1e12)
        yield {"row": f"windows {count} x {length}, {heads} x {dim}", "us": seconds * 1e6, "of floor": floor / seconds,
               "sdpa by window": graph_time([stock]) * 1e6 * count / len(parts)}


def op_rows(copy: float) -> Iterable[dict[str, Any]]:
    """The ops around attention in the sizes of Qwen3-8B, for a decode step and a prompt step."""
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    hidden, inner, heads, vocab = 4096, 12288, 32, 151936
    for tokens in (256, 8192):
        count = max(2, -(-L2_BYTES // (tokens * inner * 4)))  # enough sets that a call finds nothing in L2
        size = (count, tokens)
        slots = torch.randperm(tokens, device="cuda")
        caches = [torch.empty(tokens // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **bf16) for _ in range(2)]
        weight, norm = torch.ones(hidden, **bf16), torch.ones(HEAD_DIM, **bf16)
        cos, sin = torch.rand(2, tokens, HEAD_DIM, **bf16)
        to_cache = HeadsToCache(norm, norm, 1e-6, cos, sin, slots, slots, *caches)
        x, residual = torch.randn(*size, hidden, **bf16), torch.randn(*size, hidden, **bf16)
        gate_up = torch.randn(*size, 2 * inner, **bf16)
        qkv = torch.randn(*size, (heads + 2 * KV_HEADS) * HEAD_DIM, **bf16)
        key, value = torch.randn(2, *size, KV_HEADS, HEAD_DIM, **bf16)
        ops: list[tuple[str, int, list[Callable[[], object]]]] = [
            ("add_rms_norm", 4 * hidden,
             [partial(add_rms_norm, *pair, weight, 1e-6) for pair in zip(x, residual, strict=True)]),
            ("silu_mul", 3 * inner, [partial(silu_mul, each) for each in gate_up]),
            ("qk_norm_rope_store", (2 * heads + 4 * KV_HEADS + 2) * HEAD_DIM,
             [partial(qk_norm_rope_store, each, to_cache) for each in qkv]),
            ("store_kv", 4 * KV_HEADS * HEAD_DIM,
             [partial(store_kv, *pair, *caches, slots) for pair in zip(key, value, strict=True)]),
        ]
        for name, width, calls in ops:
            yield _bandwidth_row(f"{name} {tokens}", 2 * tokens * width, calls, copy)
        del x, residual, gate_up, qkv, key, value
    for rows in (1, 16):
        weights = [torch.randn(hidden, hidden, **bf16) for _ in range(14)]
        calls = [partial(linear, torch.randn(rows, hidden, **bf16), weight) for weight in weights]
        yield _bandwidth_row(f"linear {rows} x 4096 x 4096", 2 * hidden * hidden, calls, copy)
    packed = [_packed(hidden, hidden) for _ in range(14)]
    for rows in (1, 16, 64, 256):  # 256: by pieces in a scratch
        calls = [partial(linear_4bit, torch.randn(rows, hidden, **bf16), group) for group in packed]
        nbytes = sum(t.nbytes for t in (packed[0].weights[0].data, packed[0].weights[0].absmax))
        yield _bandwidth_row(f"linear_4bit {rows} x 4096 x 4096", nbytes, calls, copy)
    logits = [torch.randn(256, vocab, **bf16) for _ in range(6)]
    position = torch.zeros(256, dtype=torch.int64, device="cuda")
    for name, top_k, tail in (("temperature", 0, 0.0), ("top-k 50, top-p 0.9", 50, 0.1)):
        table = SamplingTable(torch.tensor([[0.7, tail, 0.0]], device="cuda").repeat(256, 1),
                              torch.tensor([[1, top_k, 0]], device="cuda").repeat(256, 1),
                              torch.full((256, 1), -1, device="cuda"))
        rows_of = torch.arange(256, device="cuda")
        calls = [partial(sample_tokens, each, table, rows_of, position) for each in logits]
        yield _bandwidth_row(f"sample_tokens 256, {name}", 2 * 256 * vocab, calls, copy)


def _packed(outputs: int, width: int) -> Packed4BitGroup:
    """A weight of random numbers in blocks of 64, whose scales are nested."""
    scales = outputs * width // 64
    nested = NestedScales(torch.rand(256, device="cuda"), torch.rand(scales // 256, device="cuda"),
                          torch.zeros(1, device="cuda"), 256)
    sizes = outputs * width // 2, scales
    data, absmax = (torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes)
    weight = Packed4Bit(data, torch.Size((outputs, width)), torch.randn(16, device="cuda"), absmax, 64, nested)
    return Packed4BitGroup((weight,), (), torch.empty(SCRATCH_BYTES // 2, dtype=torch.bfloat16, device="cuda"))


def expert_rows(copy: float, gemm: float) -> Iterable[dict[str, Any]]:
    """A block of experts and the norm behind it, and by transformers' own modules; bytes are those of the experts that
    some row chooses. Skewed: the n-th expert is about 1 / n as likely as the first (Zipf). 3 of 4: a row of padding."""
    for shape in BLOCKS:
        blocks = [_block_of_experts(shape, seed) for seed in range(2)]
        for name, rows in itertools.product(("uniform", "skewed"), EXPERT_ROWS[shape]):
            yield _expert_row(f"experts of {shape}, {rows}, {name}", blocks, _expert_inputs(blocks, rows, name), None,
                              copy, gemm)
        lengths = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device="cuda")
        inputs = _expert_inputs(blocks, 4, "uniform")
        yield _expert_row(f"experts of {shape}, 3 of 4, uniform", blocks, inputs, lengths, copy, gemm)
        del blocks
        torch.cuda.empty_cache()


def _expert_inputs(blocks: list[Any], rows: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, whose first column says how much the router prefers some experts, and a residual."""
    width = blocks[0].experts.down_proj.shape[2 if blocks[0].experts.is_transposed else 1]
    x = torch.randn(rows, width, device="cuda")
    x[:, 0] = 8.0 if name == "skewed" else 0.0
    return x.to(torch.bfloat16), torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")


def _expert_row(name: str, blocks: list[Any], inputs: tuple[torch.Tensor, torch.Tensor], lengths: torch.Tensor | None,
                copy: float, gemm: float) -> dict[str, Any]:
    x, residual = inputs
    (rows, width), norm = x.shape, torch.ones_like(x[0])
    arrivals = new_arrivals(torch.device("cuda", torch.cuda.current_device()))
    parts = [read_experts(block, "grouped_mm", torch.bfloat16, arrivals) for block in blocks]
    known = [part for part in parts if isinstance(part, ExpertsParts)]
    assert len(known) == len(blocks), parts

    def own(part: ExpertsParts) -> object:
        outputs = part.products(x, part.routes(x, lengths))
        return join_experts_add_rms_norm(outputs, residual, norm, 1e-6)

    def stock(block: Any) -> object:
        found = block(x[None])
        return add_rms_norm((found[0] if isinstance(found, tuple) else found)[0], residual, norm, 1e-6)

    routes = known[0].routes(x, lengths)
    inner, outputs = gate_up(x, known[0].gate_up, routes, known[0].gating), known[0].products(x, routes)
    real = routes.groups[:, 0] >= 0
    hit, pairs = len(routes.groups[real, 0].unique()), int(routes.groups[real, 2].sum())
    size = 3 * width * inner.shape[1]
    seconds = graph_time([partial(own, part) for part in known])
    found = {"row": f"{name}, {hit} of {len(known[0].router.weight)}", "us": seconds * 1e6}
    found |= {"of copy": hit * size * 2 / seconds / 1e12 / copy, "of GEMM": pairs * size * 2 / seconds / 1e12 / gemm}
    for implementation in ("grouped_mm", *(["batched_mm"] if rows <= 8 else [])):
        for block in blocks:
            block.experts.config._experts_implementation = implementation
        found[f"{implementation} us"] = graph_time([partial(stock, block) for block in blocks]) * 1e6
    pieces: dict[str, list[Callable[[], object]]] = {
        "route": [partial(route, x, part.router, part.rule, arrivals, lengths) for part in known],
        "gate_up": [partial(gate_up, x, part.gate_up, routes, part.gating) for part in known],
        "down": [partial(down, inner, part.down, routes) for part in known],
        "join": [partial(join_experts_add_rms_norm, outputs, residual, norm, 1e-6)],
    }
    return found | {f"{piece} us": graph_time(calls) * 1e6 for piece, calls in pieces.items()}


def _block_of_experts(shape: str, seed: int) -> Any:
    kind, config = BLOCKS[shape]
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.device("cuda"), torch.no_grad():
        block = kind(config).to(torch.bfloat16).eval()
        for parameter in block.parameters():
            parameter.requires_grad_(False).normal_(0.0, config.hidden_size**-0.5, generator=generator)
        router = getattr(block, "gate", None) or block.router
        likely = torch.arange(1, len(router.weight) + 1).float().log().neg()
        router.weight[:, 0] = likely[torch.randperm(len(likely))] / 8.0
    return block


def expert_sweep_rows() -> Iterable[dict[str, Any]]:
    """The three best settings of both products of experts for each number of rows."""
    blocks = [_block_of_experts("Qwen3-30B-A3B", seed) for seed in range(2)]
    arrivals = new_arrivals(torch.device("cuda", torch.cuda.current_device()))
    parts = [read_experts(block, "grouped_mm", torch.bfloat16, arrivals) for block in blocks]
    known = [part for part in parts if isinstance(part, ExpertsParts)]
    shapes = [(tile, block_n, block_k, warps, stages) for tile, block_n, block_k, warps, stages in itertools.product(
        (32, 64, 128, 256), (64, 128, 256), (64, 128), (4, 8), (3, 4)) if tile * block_n <= 128 * 256]
    for rows, name in itertools.product((256, 512, 2048, 8192), ("uniform", "skewed")):
        x, _ = _expert_inputs(blocks, rows, name)
        routes = known[0].routes(x, None)
        inner = gate_up(x, known[0].gate_up, routes)
        for product in ("gate_up", "down"):
            tried: list[tuple[float, str]] = []
            for tile, block_n, block_k, warps, stages in shapes:
                config = ExpertsConfig(tile, max(1, -(-rows * 8 * 2 // 128 // tile)), block_n, block_k, warps, stages)
                calls: list[Callable[[], object]] = [
                    partial(gate_up_triton, x, part.gate_up, routes, config=config) if product == "gate_up" else
                    partial(down_triton, inner, part.down, routes, config) for part in known]
                try:
                    tried.append((graph_time(calls, 5), str(tuple(config))))
                except triton.runtime.errors.OutOfResources:
                    continue
            for seconds, setting in sorted(tried)[:3]:
                yield {"row": f"{product}, {rows}, {name}", "us": seconds * 1e6, "setting": setting}


def _bandwidth_row(name: str, nbytes: int, calls: list[Callable[[], object]], copy: float) -> dict[str, Any]:
    seconds = graph_time(calls)
    rate = nbytes / seconds / 1e12
    return {"row": name, "us": seconds * 1e6, "TB/s": rate, "of copy": rate / copy}


def checksum_rows(copy: float) -> Iterable[dict[str, Any]]:
    """16 GB of bf16 in the sizes of an 8B model's layers."""
    sizes = [4096 * 4096 * 2, 4096 * 2048, 3 * 4096 * 12288, 4096] * 36 + [151936 * 4096] * 2
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_() for size in sizes]
    nbytes = 2 * sum(sizes)
    plan = ChecksumPlan()
    seconds = graph_time([lambda: plan(tensors)], 3)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    int(ChecksumPlan()(tensors))
    wall = time.perf_counter() - begin
    yield {
        "row": f"weights_checksum {nbytes / 1e9:.1f} GB", "us": seconds * 1e6, "TB/s": nbytes / seconds / 1e12,
        "of copy": nbytes / seconds / 1e12 / copy, "first call and wait, us": wall * 1e6,
    }


def sweep_rows() -> Iterable[dict[str, Any]]:
    """The three best settings of each decode row (prefill: `prefill_tuning.py`)."""
    tried: list[tuple[float, str]]
    for rows, length, heads, *_ in DECODE:
        inputs, tried = make_inputs(rows, length, heads, 1), []
        shapes = ((32, 2, 2), (32, 2, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
        configs = [DecodeConfig(*shape, 0) for shape in shapes]
        for config, programs in itertools.product(configs, (1, 2, 3, 4, 6)):
            work = decode_work(rows, length, config._replace(programs_per_sm=programs))
            meta = inputs.meta._replace(work=work)
            try:
                seconds = attention_time(paged_attention_decode, inputs._replace(meta=meta), config=config)
            except triton.runtime.errors.OutOfResources:
                continue
            tried.append((seconds, f"{config[:3]} programs {programs}"))
        for seconds, setting in sorted(tried)[:3]:
            rate = 2 * 2 * rows * length * KV_HEADS * HEAD_DIM / seconds / 1e12
            yield {"row": f"decode {rows} x {length}, {heads}", "us": seconds * 1e6, "TB/s": rate, "setting": setting}


def cpu_rows() -> Iterable[dict[str, Any]]:
    """fp32, 8 query heads, 4 KV heads, head_dim 64, eight layers' caches in turn."""
    r = random.Random(0)
    caches = [(torch.randn(1400, 16, 4, 64), torch.randn(1400, 16, 4, 64)) for _ in range(8)]
    table = (torch.randperm(1399) + 1)[: 32 * 32].view(32, 32).int()
    shapes = [("decode 32 rows of 100-400", [(1, r.randint(100, 400)) for _ in range(32)])]
    shapes += [(f"prefill {n} new, {cached} cached", [(n, n + cached)]) for n, cached in [(16, 0), (64, 0), (256, 0)]]
    shapes += [("prefill 64 new, 256 cached", [(64, 320)])]
    for name, rows in shapes:
        lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
        starts = torch.tensor([0, *itertools.accumulate(new for new, _ in rows)], dtype=torch.int32)
        slots, mapping = torch.arange(len(rows), dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        meta = PagedMetadata(starts, lengths, table, slots, mapping, max(n for n, _ in rows), int(lengths.max()))
        q = torch.randn(int(starts[-1]), 8, 64)
        times = []
        for i in range(80):
            begin = time.perf_counter()
            paged_attention(q, caches[i % 8][0], caches[i % 8][1], meta, AttentionOptions(0.125), backend="torch")
            times.append((time.perf_counter() - begin) * 1e6)
        yield {"row": name, "us": statistics.median(times[8:]), "fastest us": min(times)}


def show(row: dict[str, Any]) -> dict[str, Any]:
    cells = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print(" | ".join(cells).removeprefix("row "), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--sweep", action="store_true", help="try tile shapes and plans for decode (GPU, minutes)")
    parser.add_argument("--only", choices=("decode", "prefill", "towers", "ops", "experts", "checksum"),
                        help="only such rows; with --sweep decode or experts")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    print(report)
    if not gpu:
        rows = cpu_rows()
    elif arguments.sweep:
        rows = expert_sweep_rows() if arguments.only == "experts" else sweep_rows()
    else:
        report.update(ceilings())
        copy, gemm = report["copy_tb_s"], report["gemm_tflop_s"]
        print(f"copy {copy:.2f} TB/s, GEMM {gemm:.0f} TFLOP/s")
        kinds: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "decode": partial(decode_rows, copy), "prefill": partial(prefill_rows, gemm),
            "towers": partial(tower_rows, copy, gemm), "ops": partial(op_rows, copy),
            "experts": partial(expert_rows, copy, gemm), "checksum": partial(checksum_rows, copy)}
        rows = itertools.chain.from_iterable(run() for kind, run in kinds.items() if arguments.only in (None, kind))
    report["rows"] = [show(row) for row in rows]
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
