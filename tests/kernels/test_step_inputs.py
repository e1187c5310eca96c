"""step_inputs against the definition, token by token."""

import pytest
import torch

from hf_paged.kernels.step_inputs import step_inputs, step_inputs_host, step_inputs_reference, step_inputs_triton


def case(num_tokens, device="cpu"):
    g = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randint(0, 1000, (9, 64), generator=g, dtype=torch.int32)
    table = torch.randint(0, 2**27, (9, 4), generator=g, dtype=torch.int32)
    slots = torch.randint(0, 9, (num_tokens,), generator=g)
    positions = torch.randint(-1, 64, (num_tokens,), generator=g)
    write_from = torch.randint(0, 64, (num_tokens,), generator=g)
    return [t.to(device) for t in (tokens, table, slots, positions, write_from)]


def right(tokens, table, slots, positions, write_from, block_size):
    rows = []
    for slot, position, first in zip(slots.tolist(), positions.tolist(), write_from.tolist(), strict=True):
        at = max(position, 0)
        where = int(table[slot, at // block_size]) * block_size + at % block_size
        rows.append((int(tokens[slot, at]), at, where if position >= first else -1))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("run", [step_inputs, step_inputs_reference, step_inputs_host, step_inputs_triton])
def test_every_token(run, num_tokens):
    tokens, table, slots, positions, write_from = case(num_tokens)
    found = run(tokens, table, slots, positions, write_from, 16)
    assert torch.equal(torch.stack(found[:3], 1), right(tokens, table, slots, positions, write_from, 16))
    assert found.seq_lens is None and found.slots is None


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("run", [step_inputs, step_inputs_reference, step_inputs_host, step_inputs_triton])
def test_decode_rows_write_all_and_see_what_lies_before_them(run, num_tokens):
    tokens, table, slots, positions, _ = case(num_tokens)
    found = run(tokens, table, slots, positions, None, 16)
    assert torch.equal(torch.stack(found[:3], 1), right(tokens, table, slots, positions, torch.zeros_like(slots), 16))
    assert found.seq_lens.dtype == found.slots.dtype == torch.int32
    assert found.seq_lens.tolist() == [position + 1 for position in positions.tolist()]
    assert found.slots.tolist() == slots.tolist()


@pytest.mark.gpu
def test_gpu_equals_reference():
    for num_tokens in (1, 1000):
        inputs = case(num_tokens, "cuda")
        for write_from in (inputs[-1], None):
            made, expected_of_all = (run(*inputs[:-1], write_from, 16) for run in (step_inputs, step_inputs_reference))
            for found, expected in zip(made, expected_of_all, strict=True):
                assert found is expected is None or torch.equal(found, expected)
