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


@pytest.mark.interpreted
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("run", [step_inputs, step_inputs_reference, step_inputs_host, step_inputs_triton])
def test_every_token(run, num_tokens):
    tokens, table, slots, positions, write_from = case(num_tokens)
    found = run(tokens, table, slots, positions, write_from, 16)
    assert torch.equal(torch.stack(found, 1), right(tokens, table, slots, positions, write_from, 16))
    found = run(tokens, table, slots, positions, None, 16)
    assert torch.equal(torch.stack(found, 1), right(tokens, table, slots, positions, torch.zeros_like(slots), 16))


@pytest.mark.gpu
def test_gpu_equals_reference():
    for num_tokens in (1, 1000):
        inputs = case(num_tokens, "cuda")
        for found, expected in zip(step_inputs(*inputs, 16), step_inputs_reference(*inputs, 16), strict=True):
            assert torch.equal(found, expected)
