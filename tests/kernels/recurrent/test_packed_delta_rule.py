"""packed_delta_rule: the reference is stock's function row by row, the kernel as near to float64 as stock's is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packed_cases import COUNTS, assert_as_near, computed, error, exact, mixed_of, packed
from recurrent_models import with_idiom
from torch.nn.functional import softplus

import hf_paged
from hf_paged.kernels.recurrent.packed_delta_rule import (
    CHUNK,
    packed_delta_rule,
    packed_delta_rule_reference,
    packed_delta_rule_triton,
    scratch_bytes,
)

SIZES = [{}, {"heads": 3, "group": 1, "key_dim": 32, "value_dim": 16}, {"heads": 1, "group": 3, "value_dim": 64},
         {"heads": 1, "group": 2, "key_dim": 128, "value_dim": 128, "counts": (67, 2), "earlier": (1, 0)}]


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_is_as_near_to_float64_as_the_reference(sizes, dtype, block):
    case = packed(dtype, **sizes)
    mixed = mixed_of(case)
    assert_as_near(case, mixed, *computed(packed_delta_rule_triton, case, mixed, block=block))


@pytest.mark.interpreted
def test_bfloat16():
    """The interpreter cuts it off, beta included: errors of one part in 128."""
    case = packed(torch.bfloat16)
    mixed = mixed_of(case)
    made, states = computed(packed_delta_rule_triton, case, mixed)
    known, expected = exact(case, mixed)
    assert error(made, known) < 1e-2 and error(states[case.begun], expected[case.begun]) < 1e-2


@pytest.mark.interpreted
def test_keys_that_are_all_alike():
    """The hardest system: its powers are huge, its inverse is small."""
    case = packed(torch.float32, counts=(150,), earlier=(1,))
    case.gates.beta.fill_(9.0)
    case.gates.dt_bias.fill_(-9.0)  # next to no decay
    mixed = mixed_of(case)
    mixed[:, 32:64] = mixed[:1, 32:64]
    assert_as_near(case, mixed, *computed(packed_delta_rule_triton, case, mixed), times=8.0)


@pytest.mark.interpreted
def test_a_strong_decay():
    """States are forgotten within a token."""
    case = packed(torch.float32, counts=(70, 3), earlier=(1, 2))
    case.gates.dt_bias.fill_(200.0)
    mixed = mixed_of(case)
    assert_as_near(case, mixed, *computed(packed_delta_rule_triton, case, mixed))


@pytest.mark.interpreted
def test_nan_stays_in_its_row():
    case = packed(torch.float32)
    mixed = mixed_of(case)
    mixed[1:71] = torch.nan
    made, states = computed(packed_delta_rule_triton, case, mixed)
    assert made[1:71].isnan().all() and not made[:1].isnan().any() and not made[71:].isnan().any()
    begun = case.begun.tolist()
    assert [bool(states[slot].isnan().any()) for slot in begun] == [False, True, *[False] * (len(begun) - 2)]


@with_idiom
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_the_reference_is_stocks_function(name, dtype):
    """And so are float64's outputs, but for rounding."""
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    case = packed(dtype)
    mixed = mixed_of(case)
    made, states = computed(packed_delta_rule, case, mixed)
    starts, lengths, slots = (tensor.tolist() for tensor in case.rows)
    for first, count, length, slot in zip(starts, COUNTS, lengths, slots, strict=False):
        if not count:
            continue
        tokens = slice(first, first + count)
        query, key, value = mixed[None, tokens].split([32, 32, 128], 2)
        alpha, beta, a_log, dt_bias = case.gates
        rate = -a_log.float().exp() * softplus(alpha[tokens].flatten(1).float() + dt_bias)
        expected, state = module.torch_chunk_gated_delta_rule(
            query.unflatten(2, (2, 16)), key.unflatten(2, (2, 16)), value.unflatten(2, (4, 32)), g=rate[None],
            beta=beta[tokens].flatten(1).sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
            initial_state=case.recurrent[slot][None] if length > count else None)
        bound = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(made[tokens], expected[0], rtol=bound, atol=1e-5)
        torch.testing.assert_close(states[slot], state[0], rtol=1e-4, atol=1e-5)


def test_chunks_of_a_prompt_are_the_whole_prompt():
    """Cut at any place, the states go on in their slot."""
    case = packed(torch.float32, counts=(150,), earlier=(0,))
    mixed = mixed_of(case)
    made, states = computed(packed_delta_rule_reference, case, mixed)
    own, parts, first = case.recurrent.clone(), [], 0
    for end in (1, 64, 65, 150):
        rows = case.rows._replace(starts=torch.tensor([0, end - first]).int(), lengths=torch.tensor([end]).int())
        gates = case.gates._replace(alpha=case.gates.alpha[first:end], beta=case.gates.beta[first:end])
        parts.append(packed_delta_rule(mixed[first:end], gates, own, rows))
        first = end
    torch.testing.assert_close(torch.cat(parts), made, rtol=1e-5, atol=1e-5)
    assert error(own[case.begun], states[case.begun].double()) < 1e-5


def test_without_tokens():
    case = packed(torch.float32, counts=(0, 0), earlier=(1, 0))
    assert packed_delta_rule(torch.empty(0, 192), case.gates, case.recurrent, case.rows).shape == (0, 4, 32)


def test_the_bytes_of_a_token_are_those_of_the_tensors():
    case = packed(torch.bfloat16)
    mixed = mixed_of(case)
    made = packed_delta_rule(mixed, case.gates, case.recurrent, case.rows)
    factors = 4 * 4 * (CHUNK + 3)
    assert scratch_bytes(2, 4, 16, 32, 2) == (mixed.nbytes + 2 * made.nbytes) // len(mixed) + factors


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")
def test_the_kernels_of_packed_prompts_compile(tmp_path):
    """Which the interpreter does not show: the type of each variable, and a single token, which is a constant."""
    pytest.importorskip("triton")
    script, root = Path(__file__).with_name("packed_script.py"), Path(hf_paged.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(root), str(script.parents[2]), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert "failed: []" in done.stdout, done.stderr
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {
        "_packed_convolution_kernel", "_chunks_kernel", "_states_kernel", "_gated_rms_norm_kernel", "_scan_kernel",
        "_grouped_rms_norm_kernel"}
