"""What is fed of a prompt: parts of chunks, positions, and keys of blocks."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hf_paged.models.images.fed_prompt import EMBEDS, FedPrompt, FedRun


def run_of(first: int, count: int, identity: int) -> FedRun:
    return FedRun(first, identity, {EMBEDS: identity + torch.arange(count)[:, None] / 100})


PLAIN = FedPrompt((run_of(3, 6, 1), run_of(12, 2, 2)), None)
# Three tokens of text, an image of 2 x 3 tokens, one token of text.
ROWS = np.array([[0, 1, 2, 3, 3, 3, 3, 3, 3, 6], [0, 1, 2, 3, 3, 3, 4, 4, 4, 6], [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]])


def test_parts_of_chunks_are_the_whole():
    for step in range(1, 20):
        parts = [part for first in range(0, 20, step) for part in PLAIN.parts(first, first + step)]
        found = dict(row for part in parts for row in zip(range(part.first, part.end), part.rows[EMBEDS], strict=True))
        assert sorted(found) == [*range(3, 9), 12, 13] and len(found) == sum(part.end - part.first for part in parts)
        assert [round(float(found[at]), 2) for at in (3, 8, 12, 13)] == [1.0, 1.05, 2.0, 2.01]


def test_positions_go_on_behind_the_prompt_on_each_axis():
    prompt = FedPrompt((), ROWS)
    assert PLAIN.positions_of(0, 9) is None
    assert prompt.positions_of(2, 5).tolist() == ROWS[:, 2:5].tolist()
    assert prompt.positions_of(9, 12).tolist() == [[6, 7, 8]] * 3
    assert FedPrompt((), ROWS[:, :9]).positions_of(8, 11).tolist() == [[3, 4, 5], [4, 5, 6], [5, 6, 7]]
    for first, end in itertools.combinations(range(14), 2):
        parts = [prompt.positions_of(at, at + 1) for at in range(first, end)]
        assert np.array_equal(np.concatenate(parts, 1), prompt.positions_of(first, end))


def test_keys_of_blocks():
    """Of 4 tokens: none where ids say all, and different ones for other rows, places, parts and steps."""
    assert PLAIN.block_key(16, 20) == FedPrompt((), ROWS).block_key(12, 16) == b""
    assert FedPrompt((), ROWS - ROWS[:, :1]).block_key(0, 3) == b""
    prompts = [PLAIN, FedPrompt((run_of(3, 6, 3),), None), FedPrompt((run_of(2, 6, 1),), None),
               FedPrompt((run_of(3, 5, 1), run_of(8, 1, 1)), None), FedPrompt(PLAIN.runs, ROWS), FedPrompt((), ROWS),
               FedPrompt((), ROWS[:1]), FedPrompt((), ROWS + 1)]
    for block in (0, 4):
        keys = [prompt.block_key(block, block + 4) for prompt in prompts]
        differ = [key for key in keys if key]
        assert all(len(key) % 2 for key in differ)  # unlike ids and cache keys
        assert not any(one != other and one.startswith(other) for one in differ for other in differ)
    assert PLAIN.block_key(0, 4) != prompts[1].block_key(0, 4) and PLAIN.block_key(4, 8) != prompts[2].block_key(4, 8)
    assert PLAIN.block_key(4, 8) == prompts[3].block_key(4, 8)  # both begin with tokens 1 to 4 of the same rows
    assert PLAIN.block_key(8, 12) != prompts[3].block_key(8, 12)
    assert prompts[-1].block_key(0, 4) != prompts[-3].block_key(0, 4) == b""
    assert prompts[-1].block_key(4, 8) == prompts[-3].block_key(4, 8) != b""  # steps, not positions


def test_equal_prompts_have_equal_keys():
    again = FedPrompt(tuple(run_of(run.first, run.end - run.first, run.identity) for run in PLAIN.runs), ROWS.copy())
    assert [again.block_key(at, at + 4) for at in range(0, 16, 4)] == [
        FedPrompt(PLAIN.runs, ROWS).block_key(at, at + 4) for at in range(0, 16, 4)]
