"""What is fed of a prompt: parts of chunks, positions, and keys of blocks."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import torch

from hf_paged.models.images.fed_prompt import EMBEDS, FedPrompt, FedRun, plain_sight


def run_of(first: int, count: int, identity: int) -> FedRun:
    return FedRun(first, identity, {EMBEDS: identity + torch.arange(count)[:, None] / 100})


IDS = list(range(100, 120))
PLAIN = FedPrompt(IDS, (run_of(3, 6, 1), run_of(12, 2, 2)), None)
# Three tokens of text, an image of 2 x 3 tokens, one token of text.
ROWS = np.array([[0, 1, 2, 3, 3, 3, 3, 3, 3, 6], [0, 1, 2, 3, 3, 3, 4, 4, 4, 6], [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]])


def test_parts_of_chunks_are_the_whole():
    for step in range(1, 20):
        parts = [part for first in range(0, 20, step) for part in PLAIN.parts(first, first + step)]
        found = dict(row for part in parts for row in zip(range(part.first, part.end), part.rows[EMBEDS], strict=True))
        assert sorted(found) == [*range(3, 9), 12, 13] and len(found) == sum(part.end - part.first for part in parts)
        assert [round(float(found[at]), 2) for at in (3, 8, 12, 13)] == [1.0, 1.05, 2.0, 2.01]


def test_positions_go_on_behind_the_prompt_on_each_axis():
    prompt = FedPrompt(IDS, (), ROWS)
    assert PLAIN.positions_of(0, 9) is None
    assert prompt.positions_of(2, 5).tolist() == ROWS[:, 2:5].tolist()
    assert prompt.positions_of(9, 12).tolist() == [[6, 7, 8]] * 3
    assert FedPrompt(IDS, (), ROWS[:, :9]).positions_of(8, 11).tolist() == [[3, 4, 5], [4, 5, 6], [5, 6, 7]]
    for first, end in itertools.combinations(range(14), 2):
        parts = [prompt.positions_of(at, at + 1) for at in range(first, end)]
        assert np.array_equal(np.concatenate(parts, 1), prompt.positions_of(first, end))


def test_keys_of_blocks():
    """Of 4 tokens: none where ids say all, and different ones for other rows, places, parts and steps."""
    assert PLAIN.block_key(16, 20) == FedPrompt(IDS, (), ROWS).block_key(12, 16) == b""
    assert FedPrompt(IDS, (), ROWS - ROWS[:, :1]).block_key(0, 3) == b""
    others = [((run_of(3, 6, 3),), None), ((run_of(2, 6, 1),), None), ((run_of(3, 5, 1), run_of(8, 1, 1)), None),
              (PLAIN.runs, ROWS), ((), ROWS), ((), ROWS[:1]), ((), ROWS + 1)]
    prompts = [PLAIN, *(FedPrompt(IDS, *other) for other in others)]
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


def spans(*spans: tuple[int, int], window: int | None = None, length: int = 20) -> dict[int | None, np.ndarray]:
    """Which positions tokens see if those of each span see all of it."""
    sight = plain_sight(length, window)
    for first, end in spans:
        sight[1, first:end] = end - 1
    return {window: sight}


def test_chunks_end_where_no_token_sees_a_later_one():
    prompt = FedPrompt(IDS, (), None, spans((3, 9), (9, 11), window=4) | spans((10, 12)))
    assert prompt.longest_chunk == 6 + 3 - 3 and PLAIN.longest_chunk == 1
    ends = {(first, end): prompt.chunk_end(first, end) for first in (0, 3, 5, 9, 15) for end in range(first + 1, 25)}
    assert [ends[0, end] for end in (1, 3, 4, 8, 9, 10, 11, 12, 13, 25 - 1)] == [1, 3, 3, 3, 9, 9, 9, 12, 13, 24]
    assert ends[3, 5] == ends[5, 6] == 9 and ends[9, 10] == 12 and ends[15, 22] == 22
    assert PLAIN.chunk_end(3, 5) == 5


def test_keys_of_blocks_whose_tokens_see_later_ones():
    """They hold what comes up to the last token that counts: ids, rows, and what those tokens see."""
    made = FedPrompt(IDS, (run_of(3, 6, 1),), None, spans((3, 9), window=4))
    assert len(made.block_key(0, 4)) > len(made.block_key(4, 8)) > len(made.block_key(12, 16)) == 0
    same_here = [dataclasses.replace(made, runs=(*made.runs, run_of(12, 2, 2))),
                 dataclasses.replace(made, ids=[*IDS[:9], *range(11)]),
                 dataclasses.replace(made, sights=spans((3, 9), (12, 14), window=4))]
    others = [dataclasses.replace(made, runs=(run_of(3, 5, 1), run_of(8, 1, 2))), FedPrompt(IDS, made.runs),
              dataclasses.replace(made, ids=[*IDS[:8], 7, *IDS[9:]]), dataclasses.replace(made, sights=spans((3, 9))),
              dataclasses.replace(made, sights=spans((3, 8), window=4))]
    for block in (0, 4):
        assert {prompt.block_key(block, block + 4) for prompt in same_here} == {made.block_key(block, block + 4)}
        keys = [made.block_key(block, block + 4), *(prompt.block_key(block, block + 4) for prompt in others)]
        assert len(set(keys)) == len(keys)
        assert not any(one != other and one.startswith(other) for one in keys for other in keys)


def stated(prompt: FedPrompt, first: int, end: int) -> tuple[object, ...]:
    """What `block_key` says that keys and values depend on, token by token."""
    sights = {window: list(zip(*sight.tolist(), strict=True)) for window, sight in prompt.sights.items()}
    last = end
    for at in itertools.count(first):
        if at >= min(last, len(IDS)):
            break
        last = max(last, *(sight[at][1] + 1 for sight in sights.values()), 0)
    fed = {at: (run.identity, at - run.first) for run in prompt.runs for at in range(run.first, run.end)}
    positions = prompt.positions_of(0, last)
    steps = None if positions is None else np.diff(positions, axis=1, prepend=-1)[:, first:last].tolist()
    plain = {window: list(zip(*plain_sight(len(IDS), window).tolist(), strict=True)) for window in sights}
    return (
        [fed.get(at) for at in range(first, last)],
        steps if positions is not None and {*itertools.chain(*steps)} != {1} else None,
        {window: own for window, sight in sights.items() if (own := sight[first:last]) != plain[window][first:last]},
        IDS[end:last],
    )


def drawn(r: random.Random) -> FedPrompt:
    """Of two images at most, whose tokens may see each other, at one of few places, so that much of two is equal."""
    places = r.choice([(), ((3, 9),), ((3, 9), (12, 14)), ((3, 7), (12, 15)), ((12, 14),), ((17, 20),)])
    runs = tuple(run_of(first, end - first, r.choice([1, 2])) for first, end in places if r.random() < 0.8)
    positions = r.choice([None, np.arange(20)[None], np.tile(np.arange(20), (3, 1))])
    if places and positions is not None and r.random() < 0.7:
        positions = positions.copy()
        first, end = places[-1]
        positions[r.randrange(len(positions)), first:end] = first + np.arange(end - first) // 2
        positions[:, end:] = r.choice([end, end - 2]) + np.arange(20 - end)
    sights = {}
    for window in r.choice([(), (None,), (4,), (4, None)]):
        sights |= spans(*places, window=window) if places else {}
    return FedPrompt(IDS, runs, positions, sights)


def test_keys_are_equal_where_all_that_they_state_is():
    """Of random prompts, block by block; a prompt may end inside of a block."""
    r = random.Random(1)
    prompts = [drawn(r) for _ in range(90)]
    for first, end in [(first, first + size) for size in (1, 4, 16) for first in range(0, 24, size)]:
        found: dict[bytes, tuple[object, ...]] = {}
        for prompt in prompts:
            key, expected = prompt.block_key(first, end), stated(prompt, first, end)
            assert found.setdefault(key, expected) == expected
            assert dataclasses.replace(prompt).block_key(first, end) == key, "of one that was asked before"
        assert len(found) == len({repr(expected) for expected in found.values()})
        assert found.get(b"", "nothing") in ("nothing", ([None] * (end - first), None, {}, []))


def test_a_block_that_goes_on_behind_the_prompt_is_that_of_the_longer_prompt():
    """As output goes on: by ids, and positions that go up by 1."""
    assert ROWS[0, 9] == 6
    longer = np.concatenate([ROWS, ROWS[:, -1:] + [[1, 2]] * 3], axis=1)
    shorter, longer = FedPrompt(IDS[:10], PLAIN.runs[:1], ROWS), FedPrompt(IDS[:12], PLAIN.runs[:1], longer)
    assert shorter.block_key(8, 12) == longer.block_key(8, 12) != b"" == shorter.block_key(12, 16)


def test_contents_of_equal_prompts_are_equal():
    made = FedPrompt(IDS, PLAIN.runs, ROWS, spans((3, 9)))
    again = FedPrompt(list(IDS), tuple(run_of(run.first, run.end - run.first, run.identity) for run in PLAIN.runs),
                      ROWS.copy(), spans((3, 9)))
    others = [{"ids": [*IDS[:-1], 7]}, {"runs": PLAIN.runs[:1]}, {"runs": (run_of(3, 6, 1), run_of(12, 2, 3))},
              {"runs": (run_of(3, 5, 1), PLAIN.runs[1])}, {"positions": ROWS + 1}, {"positions": ROWS.reshape(1, -1)},
              {"positions": None}, {"sights": {}}, {"sights": spans((3, 9), window=4)}, {"sights": spans((3, 8))}]
    assert made.content == again.content
    assert len({made.content, *(dataclasses.replace(made, **other).content for other in others)}) == 1 + len(others)


def test_no_tokens_have_no_key():
    """In front of a block, and behind the prompt."""
    for prompt in (PLAIN, FedPrompt(IDS, (), ROWS), FedPrompt(IDS, (), None, spans((3, 9)))):
        assert {prompt.block_key(first, first) for first in (0, 4, 10, 20, 25)} == {b""}


def test_equal_prompts_have_equal_keys():
    runs = tuple(run_of(run.first, run.end - run.first, run.identity) for run in PLAIN.runs)
    again = FedPrompt(list(IDS), runs, ROWS.copy())
    assert [again.block_key(at, at + 4) for at in range(0, 16, 4)] == [
        FedPrompt(IDS, PLAIN.runs, ROWS).block_key(at, at + 4) for at in range(0, 16, 4)]


def test_rows_on_the_host():
    """Nothing else of a prompt changes."""
    rows = {EMBEDS: torch.ones(2, 3)}
    prompt = FedPrompt([1, 2, 3], (FedRun(1, 7, rows),), np.arange(3)[None] + 1)
    found = prompt.on_host()
    assert found.runs[0].rows[EMBEDS].device.type == "cpu" and torch.equal(found.runs[0].rows[EMBEDS], rows[EMBEDS])
    assert found.block_key(0, 3) == prompt.block_key(0, 3)
