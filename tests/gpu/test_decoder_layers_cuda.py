"""All layers in one launch on a GPU: against float64, in graphs, beside each other, and in an engine.

    python tests/gpu/test_decoder_layers_cuda.py     # two plans on two streams, for the test with a time limit
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import layers_reference
import numpy as np
import pytest
import torch
from layers_reference import row_of_layers

import hf_paged
from hf_paged.device import virtual_memory
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.kernels.hopper.decoder_layers.shape import FAR_BITS, kinds
from hf_paged.kernels.hopper.decoder_layers_support import Decoder

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or support.why_not_on(GPU) is not None,
                       reason="the kernel does not run on this GPU"),
]
D, EPS, SCALE = 128, 1e-6, 128**-0.5
SMALL, QWEN3 = (2, 1024, 1024, 8, 4), (3, 1024, 3072, 16, 8)
LENGTHS = (0, 1, 15, 16, 17, 130, 1500)
POSITIONS = 2048


class Case:
    """A random decoder over a pool of pages in random order, and lines of a block table, from the last one on."""

    def __init__(self, layers, hidden, inner, heads, kv_heads, block_size=16, norms=True, seed=1, rows=1):
        self.random = torch.Generator(device=GPU).manual_seed(seed)
        blocks = POSITIONS // block_size * rows
        self.pool = self.normal(layers, 2, blocks, block_size, kv_heads, D)
        sizes = [((heads + 2 * kv_heads) * D, hidden), (hidden, heads * D), (2 * inner, hidden), (hidden, inner)]
        found = []
        for i in range(layers):
            weights = [self.normal(*size, scale=0.5 / size[1] ** 0.5) for size in sizes]
            head_norms = [self.norm(D) if norms else None for _ in range(2)]
            found.append((*weights, *self.pool[i], self.norm(hidden), self.norm(hidden), *head_norms))
        self.decoder = Decoder(tuple(found), self.norm(hidden), EPS, SCALE)
        self.plan = support.plan_of(self.decoder, rows)
        self.cos, self.sin = (self.normal(POSITIONS, D).clamp(-1, 1) for _ in range(2))
        order = torch.randperm(blocks, generator=self.random, device=GPU).int().view(rows, -1)
        self.table = torch.zeros(rows + 2, order.shape[1] + 3, dtype=torch.int32, device=GPU)
        self.lines = [rows + 1 - i for i in range(rows)]
        self.table[self.lines, : order.shape[1]] = order
        self.block_size, self.hidden = block_size, hidden

    def normal(self, *shape, scale=1.0):
        return (torch.randn(shape, generator=self.random, device=GPU) * scale).bfloat16()

    def norm(self, size):
        return (1 + 0.1 * torch.randn(size, generator=self.random, device=GPU)).bfloat16()

    def slot(self, length, row=0):
        block = int(self.table[self.lines[row], length // self.block_size])
        return block * self.block_size + length % self.block_size if length >= 0 else -1

    def arguments(self, rows, lengths, slots):
        lines = torch.tensor(self.lines, dtype=torch.int32, device=GPU)
        return (rows, self.cos, self.sin, lines, torch.tensor(lengths, device=GPU), torch.tensor(slots, device=GPU),
                self.table)

    def run(self, rows, lengths, slots):
        return self.plan.run(*self.arguments(rows, lengths, slots))

    def expected(self, hidden, length, row=0, *, exact):
        """Hidden states, and the last layer's new key and value: in float64, or rounded as transformers rounds."""
        dtype = torch.float64 if exact else torch.float32
        rounded = (lambda t: t) if exact else (lambda t: t.bfloat16().float())
        made = row_of_layers(self.decoder, hidden, self.cos[length], self.sin[length], self.table[self.lines[row]],
                             length, dtype, rounded)
        return made.hidden, *made.new[-1]


def error(found, expected):
    return (found.double() - expected.double()).abs().mean().item()


def assert_close(case, lengths):
    """As close to float64 as transformers' rounding, new keys and values too; nothing else is written."""
    rows, before = case.normal(len(lengths), case.hidden), case.pool.clone()
    slots = [case.slot(length, i) for i, length in enumerate(lengths)]
    real = [i for i, length in enumerate(lengths) if length >= 0]
    expected = {(i, is_exact): case.expected(rows[i], lengths[i], i, exact=is_exact)
                for i in real for is_exact in (True, False)}
    made = case.run(rows, lengths, slots)
    again = case.run(rows, lengths, slots)
    assert torch.equal(made[real], again[real]), lengths
    keys, values = (pool.reshape(-1, *pool.shape[2:]) for pool in case.decoder.layers[-1][4:6])
    for i in real:
        exact, rounded = expected[i, True], expected[i, False]
        found = made[i], keys[slots[i]], values[slots[i]]
        for one, of_exact, of_rounded in zip(found, exact, rounded, strict=True):
            assert error(one, of_exact) < 1.3 * error(of_rounded, of_exact) + 1e-6, (lengths, i)
    changed = (case.pool != before).flatten(2, 3).flatten(3).any(-1)
    assert changed.nonzero()[:, 2].unique().tolist() == sorted(slots[i] for i in real)
    case.pool.copy_(before)


@pytest.mark.parametrize(("shape", "options"), [
    (SMALL, {}), (SMALL, {"block_size": 64}), (QWEN3, {}), (QWEN3, {"block_size": 64}), (QWEN3, {"norms": False}),
    ((2, 2560, 9728, 32, 8), {}), ((2, 4096, 14336, 32, 8), {"norms": False}),
], ids=str)
def test_a_row_comes_as_close_to_float64_as_transformers_rounding(shape, options):
    case = Case(*shape, **options)
    for length in LENGTHS:
        assert_close(case, [length])


@pytest.mark.parametrize(("shape", "rows", "options"), [
    (QWEN3, 2, {}), (QWEN3, 4, {"block_size": 64}), (QWEN3, 8, {}), (QWEN3, 8, {"norms": False, "block_size": 64}),
    (SMALL, 8, {}), ((2, 1024, 1024, 16, 16), 8, {}), ((2, 2048, 6144, 16, 8), 4, {}), ((2, 2560, 9728, 32, 8), 4, {}),
    ((2, 4096, 12288, 32, 8), 2, {}),
], ids=str)
def test_several_rows_of_other_lengths(shape, rows, options):
    """A row of length -1 is padding."""
    case = Case(*shape, rows=rows, **options)
    for lengths in ([0, 1, 15, 16, 17, 600, 255, 33], [400, -1, 3, 8, -1, -1, 90, 31], [130] * 8):
        assert_close(case, lengths[:rows])


def test_layers_whose_tensors_lie_terabytes_apart():
    """As CUDA's allocators place them now and then: here the last layer lies in addresses that the driver reserves."""
    case = Case(*QWEN3, rows=2)
    sizes = [tensor.nbytes for tensor in case.decoder.layers[-1][:6]]
    memory = virtual_memory.reserve(case, GPU, len(sizes), max(sizes))
    memory.back(max(sizes))
    moved = [there[: size].view(torch.bfloat16).view(tensor.shape).copy_(tensor) for there, size, tensor in
             zip(memory.tensors(max(sizes)), sizes, case.decoder.layers[-1], strict=False)]
    layers = (*case.decoder.layers[:-1], (*moved, *case.decoder.layers[-1][6:]))
    rows, lengths = case.normal(2, case.hidden), [700, 33]
    slots = [case.slot(length, i) for i, length in enumerate(lengths)]
    expected = case.run(rows, lengths, slots)
    case.plan = support.plan_of(case.decoder._replace(layers=layers), 2)
    assert torch.equal(case.run(rows, lengths, slots), expected)
    spans = [max(t.data_ptr() for t in tensors) - min(t.data_ptr() for t in tensors) for _, tensors, _ in kinds(layers)]
    if min(spans) >> FAR_BITS == 0:  # right, but not what this is about
        pytest.skip(f"the driver's addresses lie near torch's: {spans}")


def test_a_token_without_a_slot_is_not_written_and_padding_reads_nothing():
    case = Case(*SMALL)
    row, before = case.normal(1, case.hidden), case.pool.clone()
    for length in (0, 130):
        made = case.run(row, [length], [-1])
        assert torch.equal(case.pool, before)
        assert torch.equal(made, case.run(row, [length], [case.slot(length)]))
        case.pool.copy_(before)
    first = case.run(row, [0], [-1])
    case.pool.fill_(float("nan"))
    assert torch.equal(case.run(row, [-1], [-1]), first) and bool(case.pool.isnan().all())


def test_what_lies_behind_the_row_is_not_seen():
    """A page that is longer than the row has what another request left."""
    case = Case(*SMALL)
    row = case.normal(1, case.hidden)
    made = case.run(row, [17], [-1])
    for place in range(17, 32):
        case.pool.flatten(2, 3)[:, :, case.slot(place)] = float("nan")
    assert torch.equal(case.run(row, [17], [-1]), made)


def test_a_graph_replays_the_launch_with_other_inputs():
    case = Case(*QWEN3)
    rows = case.normal(3, 1, case.hidden)
    arguments = [case.arguments(row, [length], [case.slot(length)])
                 for row, length in zip(rows, (3, 40, 700), strict=True)]
    expected = [case.plan.run(*one) for one in arguments]
    fixed = [tensor.clone() for tensor in arguments[0]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = case.plan.run(*fixed)
    for one, wanted in zip(arguments, expected, strict=True):
        for there, value in zip(fixed, one, strict=True):
            there.copy_(value)
        for _ in range(2):
            graph.replay()
            assert torch.equal(made, wanted)


def test_two_plans_run_beside_each_other():
    """In a process of its own: were one launch to wait for programs that the other keeps out, none would ever end."""
    paths = [str(Path(hf_paged.__file__).parents[1]), str(Path(layers_reference.__file__).parent),
             os.environ.get("PYTHONPATH", "")]
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["equal"], done.stdout + done.stderr


def run_beside_each_other():
    cases = [Case(*SMALL, seed=seed) for seed in (1, 2)]
    rows = [case.normal(1, case.hidden) for case in cases]
    arguments = [case.arguments(row, [700], [case.slot(700)]) for case, row in zip(cases, rows, strict=True)]
    expected = [case.plan.run(*one) for case, one in zip(cases, arguments, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    made = [[], []]
    for _ in range(200):
        for case, one, stream, results in zip(cases, arguments, streams, made, strict=True):
            with torch.cuda.stream(stream):
                results.append(case.plan.run(*one))
    torch.cuda.synchronize()
    same = all(torch.equal(one, wanted) for results, wanted in zip(made, expected, strict=True) for one in results)
    print("equal" if same else "different")


# In an engine.


def random_model(inner=3072):
    from support import tiny_model

    model = tiny_model(hidden_size=1024, intermediate_size=inner, num_hidden_layers=3, num_attention_heads=16,
                       num_key_value_heads=8, head_dim=D, max_position_embeddings=2048, initializer_range=0.04)
    return model.to("cuda", torch.bfloat16)


def wait_for_the_kernel(engine, sizes, call):
    """`call` of so many rows begins to compile it, if it does not lie on the disk."""
    for rows in sizes:
        call(rows)
    executor = engine._core.pool.runner.executor
    assert executor.may_use_one_launch(8, np.full(8, 3)), "the model is one for the kernel"
    assert all(executor._one_launch._plans.get(rows) for rows in sizes), "a plan was refused: the log says why"
    deadline = time.monotonic() + 100
    for rows in sizes:
        while not executor.uses_one_launch(rows):
            assert time.monotonic() < deadline and support.why_not_on(GPU) is None
            time.sleep(0.05)
            call(rows)  # a kernel that has come is taken once no request runs


def is_used(generator):
    """Has a graph captured the launch, or was it launched as it comes?"""
    runner = generator.engine._core.pool.runner
    if runner.graphs is None:
        return runner.executor._one_launch._have_run
    return any(captured.kept for captured in runner.graphs._captured.values() if captured is not None)


def assert_same_choices(model, prompt, made, expected):
    """Equal tokens, or at the first other one a choice that rounding to bf16 decides."""
    if made == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if a != b)
    ids = torch.tensor([prompt + expected[:at]], device=GPU)
    with torch.no_grad():
        rounded = model(ids).logits[0, -1].float()
        exact = copy.deepcopy(model).float()(ids).logits[0, -1]
    tolerance = 4 * (rounded - exact).abs().max()
    assert (exact[made[at]] - exact[expected[at]]).abs() <= tolerance, (at, made[at], expected[at])


@pytest.mark.parametrize(("shape", "options"), [
    ({}, {}), ({}, {"enforce_eager": True}), ({}, {"overlap": False}), ({}, {"block_size": 64}), ({"inner": 2048}, {}),
], ids=str)
def test_an_engine_makes_the_tokens_that_it_makes_layer_by_layer(options, shape):
    """Alone, behind its own prompt in the cache, and as the last row of a batch."""
    from support import random_prompts

    prompts, lengths = random_prompts([128, 5, 140]), [40, 3, 17]
    results = []
    for one_launch in (False, True):
        model = random_model(**shape)
        config = {"num_blocks": 200, "max_num_seqs": 4, **options}
        with hf_paged.PagedGenerator(model, one_launch=one_launch, **config) as generator:
            if one_launch:  # two rows of the batch that is left go on layer by layer
                wait_for_the_kernel(generator.engine, (1, 4), lambda rows, generator=generator: generator.generate(
                    [[i, 2, 3] for i in range(rows)], max_new_tokens=3, do_sample=False, use_tqdm=False))
            settings = {"do_sample": False, "use_tqdm": False, "eos_token_id": None}
            alone = [generator.generate(prompts[:1], max_new_tokens=30, **settings)[0] for _ in range(2)]
            assert alone[0].num_cached_tokens == 0 < alone[1].num_cached_tokens
            configs = [model.generation_config.__class__(max_new_tokens=n, do_sample=False) for n in lengths]
            together = generator.generate(prompts, configs, use_tqdm=False)
            assert is_used(generator) if one_launch else generator.engine._core.pool.runner.executor._one_launch is None
        results.append([one.token_ids for one in (*alone, *together)])
    for prompt, expected, made in zip([prompts[0], prompts[0], *prompts], *results, strict=True):
        assert_same_choices(random_model(**shape), prompt, made, expected)


def test_an_enabled_model_whose_weights_change_and_whose_pool_grows():
    from support import random_prompts

    made = []
    for one_launch in (False, True):
        model = hf_paged.enable(random_model(), one_launch=one_launch, strict=True)
        engine, tokens = hf_paged.get_engine(model), []
        if one_launch:
            wait_for_the_kernel(engine, (1,), lambda _, model=model: model.generate(
                torch.tensor([[1, 2, 3]], device=GPU), max_new_tokens=3, do_sample=False))
        for length in (20, 20, 900):
            prompt = torch.tensor(random_prompts([length]), device=GPU)
            for _ in range(2):
                tokens.append(model.generate(prompt, max_new_tokens=12, do_sample=False)[0, length:].tolist())
            with torch.no_grad():
                weight = model.model.layers[1].self_attn.o_proj.weight
                weight.data = (weight * 1.5).clone()
            assert not one_launch or engine._executor.uses_one_launch(1)
        made.append(tokens)
        hf_paged.disable(model)
    same = sum(a == b for a, b in zip(*made, strict=True))
    assert same >= 4, made  # a choice that rounding decides may go either way


if __name__ == "__main__":
    run_beside_each_other()
