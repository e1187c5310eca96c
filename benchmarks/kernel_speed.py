"""Compare the kernels with the card's limits: attention, fused ops, small products, experts, sampling, checksum.

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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.plan_decode import plan_items
from hf_paged.attention.registry import paged_attention, resolve_backend
from hf_paged.kernels.attention.decode import DecodeConfig, config_of, cta_slots_of, paged_attention_decode
from hf_paged.kernels.attention.prefill import paged_attention_prefill
from hf_paged.kernels.attention.types import AttentionOptions, DecodeWork, PagedMetadata
from hf_paged.kernels.experts.down import down
from hf_paged.kernels.experts.gate_up import gate_up
from hf_paged.kernels.experts.join import join_experts_add_rms_norm
from hf_paged.kernels.experts.route import route
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.kernels.layer.linear import linear
from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache, qk_norm_rope_store
from hf_paged.kernels.layer.silu_mul import silu_mul
from hf_paged.kernels.layer.store_kv import store_kv
from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models.experts import ExpertsParts, new_arrivals, read_experts
from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.table import SamplingTable

HEAD_DIM, KV_HEADS, BLOCK_SIZE = 128, 8, 16
EXPERT_WIDTH, EXPERT_INNER = 2048, 768  # of Qwen3-30B-A3B
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
    logits = [torch.randn(256, vocab, **bf16) for _ in range(6)]
    position = torch.zeros(256, dtype=torch.int64, device="cuda")
    for name, top_k, tail in (("temperature", 0, 0.0), ("top-k 50, top-p 0.9", 50, 0.1)):
        table = SamplingTable(torch.tensor([[0.7, tail, 0.0]], device="cuda").repeat(256, 1),
                              torch.tensor([[1, top_k, 0]], device="cuda").repeat(256, 1),
                              torch.full((256, 1), -1, device="cuda"))
        rows_of = torch.arange(256, device="cuda")
        calls = [partial(sample_tokens, each, table, rows_of, position) for each in logits]
        yield _bandwidth_row(f"sample_tokens 256, {name}", 2 * 256 * vocab, calls, copy)


def expert_rows(copy: float) -> Iterable[dict[str, Any]]:
    """A block of experts of Qwen3-30B-A3B and the norm behind it, and by transformers' own modules; bytes are those of
    the experts that some row chooses. Skewed: the n-th expert is about 1 / n as likely as the first (Zipf)."""
    blocks = [_block_of_experts(seed) for seed in range(2)]
    device = torch.device("cuda", torch.cuda.current_device())
    arrivals, norm = new_arrivals(device), torch.ones(EXPERT_WIDTH, dtype=torch.bfloat16, device=device)
    for name, rows in itertools.product(("uniform", "skewed"), (1, 8, 64, 256)):
        skew = 8.0 if name == "skewed" else 0.0
        x = torch.randn(rows, EXPERT_WIDTH, device=device)
        x[:, 0] = skew  # the router's first column says how likely an expert is
        x, residual = x.to(torch.bfloat16), torch.randn(rows, EXPERT_WIDTH, dtype=torch.bfloat16, device=device)
        parts = [read_experts(block, "grouped_mm", torch.bfloat16, arrivals) for block in blocks]
        known = [part for part in parts if isinstance(part, ExpertsParts)]
        assert len(known) == len(blocks), parts

        def own(part: ExpertsParts, x: torch.Tensor = x, residual: torch.Tensor = residual) -> object:
            outputs = part.outputs(x, None)
            assert outputs is not None
            return join_experts_add_rms_norm(outputs, residual, norm, 1e-6)

        def stock(block: Any, x: torch.Tensor = x, residual: torch.Tensor = residual) -> object:
            return add_rms_norm(block(x[None])[0], residual, norm, 1e-6)

        outputs = known[0].outputs(x, None)
        assert outputs is not None
        routes = outputs.routes
        inner = gate_up(x, known[0].gate_up, routes)
        hit = int((routes.groups[:, 0] >= 0).sum())
        nbytes = hit * 3 * 2 * EXPERT_WIDTH * EXPERT_INNER
        found = _bandwidth_row(f"experts {rows}, {name}, {hit} of 128", nbytes, [partial(own, p) for p in known], copy)
        for implementation in ("grouped_mm", *(["batched_mm"] if rows <= 8 else [])):
            for block in blocks:
                block.experts.config._experts_implementation = implementation
            found[f"{implementation} us"] = graph_time([partial(stock, block) for block in blocks]) * 1e6
        pieces: dict[str, list[Callable[[], object]]] = {
            "route": [partial(route, x, p.router, p.rule, arrivals) for p in known],
            "gate_up": [partial(gate_up, x, p.gate_up, routes) for p in known],
            "down": [partial(down, inner, p.down, routes) for p in known],
            "join": [partial(join_experts_add_rms_norm, outputs, residual, norm, 1e-6)],
        }
        yield found | {f"{piece} us": graph_time(calls) * 1e6 for piece, calls in pieces.items()}


def _block_of_experts(seed: int) -> Any:
    config = Qwen3MoeConfig(hidden_size=EXPERT_WIDTH, moe_intermediate_size=EXPERT_INNER, num_experts=128,
                            num_experts_per_tok=8, norm_topk_prob=True)
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.device("cuda"), torch.no_grad():
        block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval()
        for parameter in block.parameters():
            parameter.requires_grad_(False).normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        likely = torch.arange(1, 129, device="cuda").float().log().neg()
        block.gate.weight[:, 0] = likely[torch.randperm(128, device="cuda")] / 8.0
    return block


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
    parser.add_argument("--only", choices=("decode", "prefill", "ops", "experts", "checksum"), help="only such rows")
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
        rows = sweep_rows()
    else:
        report.update(ceilings())
        copy, gemm = report["copy_tb_s"], report["gemm_tflop_s"]
        print(f"copy {copy:.2f} TB/s, GEMM {gemm:.0f} TFLOP/s")
        kinds = {"decode": (decode_rows, copy), "prefill": (prefill_rows, gemm), "ops": (op_rows, copy),
                 "experts": (expert_rows, copy), "checksum": (checksum_rows, copy)}
        rows = itertools.chain.from_iterable(
            run(ceiling) for kind, (run, ceiling) in kinds.items() if arguments.only in (None, kind))
    report["rows"] = [show(row) for row in rows]
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
