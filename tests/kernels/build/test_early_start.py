"""Kernels that start before their predecessor ends (programmatic dependent launch) see and spoil nothing too early.

Without guarded outputs: filling those would put other kernels between the ones that are to overlap.
"""

import pytest
import torch

from hf_paged.kernels._triton import pdl_options, pdl_supported
from hf_paged.kernels.attention.decode import paged_attention_decode
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.kernels.layer.linear import linear, linear_silu_mul
from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache, qk_norm_rope_store
from hf_paged.kernels.layer.silu_mul import silu_mul

EPS = 1e-6


@pytest.mark.interpreted
def test_there_is_no_early_start_in_the_interpreter():
    assert not pdl_supported(torch.device("cpu"))
    assert pdl_options(torch.empty(1)) == {"PDL": False}


@pytest.mark.gpu
def test_gpu_weights_written_just_before_are_read():
    """A weight is prefetched while the kernel that writes it may still run."""
    x, weight = (torch.randn(n, 2048, dtype=torch.bfloat16, device="cuda") for n in (1, 4096))
    written = torch.empty_like(weight)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        linear(x, written)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            torch.mul(weight, 2, out=written)
            out = linear(x, written)
            linear(x, weight)
            torch.mul(weight, -1, out=written)
            later = linear(x, written)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, -2 * later)
    assert torch.equal(out, 2 * linear(x, weight))


class Chain:
    """Three layers of a model's decode step, on paged caches, by separate or fused ops."""

    def __init__(self, rows, dtype=torch.bfloat16, hidden=1024, heads=16, kv_heads=8, inner=3072, layers=3):
        torch.manual_seed(rows)

        def randn(*shape, scale=1.0):
            return (torch.randn(*shape, device="cuda") * scale).to(dtype)

        self.rows, self.heads = rows, heads
        self.x, self.norms = randn(rows, hidden), [1 + 0.1 * randn(hidden) for _ in range(2 * layers)]
        q, kv = heads * 128, kv_heads * 128
        shapes = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
        self.weights = [[randn(n, k, scale=k**-0.5) for n, k in shapes] for _ in range(layers)]
        self.head_norm = 1 + 0.1 * randn(128)
        self.cos, self.sin = randn(600, 128), randn(600, 128)
        blocks = 40 * rows
        self.caches = [(randn(blocks, 16, kv_heads, 128), randn(blocks, 16, kv_heads, 128)) for _ in range(layers)]
        self.positions = torch.arange(500, 500 + rows, device="cuda")
        slots = torch.arange(rows, device="cuda") * 640 + self.positions
        self.meta = PagedMetadata(
            query_start=torch.arange(rows + 1, device="cuda").int(), seq_lens=(self.positions + 1).int(),
            block_table=torch.arange(blocks, device="cuda").int().view(rows, 40),
            slots=torch.arange(rows, device="cuda").int(), slot_mapping=slots, max_query_len=1, max_seq_len=640,
        )

    def step(self, fused=False):
        delta, residual = self.x, None
        for i, (qkv_w, o_w, gate_up_w, down_w) in enumerate(self.weights):
            normed, residual = add_rms_norm(delta, residual, self.norms[2 * i], EPS)
            heads = HeadsToCache(self.head_norm, self.head_norm, EPS, self.cos, self.sin, self.positions,
                                 self.meta.slot_mapping, *self.caches[i])
            query = qk_norm_rope_store(linear(normed, qkv_w), heads)
            mixed = paged_attention_decode(query, *self.caches[i], self.meta, AttentionOptions(128**-0.5))
            delta = linear(mixed.flatten(1), o_w)
            normed, residual = add_rms_norm(delta, residual, self.norms[2 * i + 1], EPS)
            hidden = linear_silu_mul(normed, gate_up_w) if fused else silu_mul(linear(normed, gate_up_w))
            delta = linear(hidden, down_w)
        return delta, residual


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gpu_a_chain_in_a_graph_equals_the_chain_with_a_wait_after_every_op(rows, fused, monkeypatch):
    """Overlapping starts: nothing is read before it is written, nothing overwritten before it is read."""
    chain = Chain(rows)
    with monkeypatch.context() as patch:
        patch.setattr("hf_paged.kernels._triton.pdl_supported", lambda device: False)
        expected = chain.step(fused)
        torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        chain.step(fused)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = [chain.step(fused) for _ in range(4)]
    for _ in range(100):
        graph.replay()
        torch.cuda.synchronize()
        for result in results:
            assert all(map(torch.equal, result, expected))
            for tensor in result:
                tensor.fill_(torch.nan)
