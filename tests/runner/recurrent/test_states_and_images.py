"""Prompts with images of models with a recurrent state: stock's tokens from snapshots, in packed prompts and beside
graphs, and a state that is found by what was fed alone."""

from __future__ import annotations

import pytest
import torch
from image_calls import image_call, seeing_model
from recurrent_models import with_idiom
from runner.test_graphs import uncaptured
from support import assert_native_parity, stock_generate

import hf_paged
from hf_paged.engine.engine import Engine
from hf_paged.models.images.fed_rows import FedRows
from hf_paged.scheduler import snapshots

pytestmark = with_idiom

NEW = {"max_new_tokens": 6}
# Images of equal sizes: their prompts have the same ids. The first two fit in front of the first full block.
SHORT, SHORT_OTHER = [3, "0", 4], [3, "4", 4]
LONG, LONG_OTHER = [17, "1", 3], [17, "5", 3]


@pytest.fixture(params=["qwen3.5", "lfm2-vl", pytest.param("qwen3.5-moe", marks=pytest.mark.slow)])
def model(request):
    return seeing_model(request.param)


@pytest.fixture
def qwen():
    return seeing_model("qwen3.5")


def cached_tokens(monkeypatch):
    """The number of cached tokens of each request that ends from now on."""
    found, advance = [], Engine.advance

    def watched(self, *args, **kwargs):
        outputs = advance(self, *args, **kwargs)
        found.extend(output.completion.num_cached_tokens for output in outputs[0] if output.completion)
        return outputs

    monkeypatch.setattr(Engine, "advance", watched)
    return found


def with_equal_ids(model, *rows):
    """Calls of one prompt each, whose ids are equal and whose images are not."""
    calls = [image_call(model, [row]) for row in rows]
    assert all(torch.equal(call["input_ids"], calls[0]["input_ids"]) for call in calls)
    expected = [stock_generate(model, **call, **NEW) for call in calls]
    assert not torch.equal(*expected)
    return calls, expected


def test_the_same_ids_with_another_image_hit_no_state(model, monkeypatch):
    """The image lies behind the last full block, where the snapshot alone has it."""
    calls, expected = with_equal_ids(model, LONG, LONG_OTHER)
    length, found = calls[0]["input_ids"].shape[1], cached_tokens(monkeypatch)
    hf_paged.enable(model, strict=True, block_size=16)
    for number in (0, 1, 0, 1):
        assert_native_parity(model, expected[number], **calls[number], **NEW)
    # The second prompt hits the state behind the block of text at most, which it is the first to save.
    assert found == [0, 0, length - 1, length - 1]


def test_prompts_shorter_than_a_block_hit_no_state_of_another_image(model, monkeypatch):
    """Of one call: in front of a full block the engine goes on from states while it is busy."""
    call, found = image_call(model, [SHORT, SHORT_OTHER, SHORT, SHORT_OTHER]), cached_tokens(monkeypatch)
    expected = stock_generate(model, **call, **NEW)
    length = call["input_ids"].shape[1]
    assert length < 16 and not torch.equal(expected[0], expected[1])
    hf_paged.enable(model, strict=True, block_size=16)
    assert_native_parity(model, expected, **call, **NEW)
    assert sorted(found) == [0, 0, length - 1, length - 1]


@pytest.mark.parametrize("rows", [(LONG, LONG_OTHER), (SHORT, SHORT_OTHER)])
def test_tails_without_what_was_fed_change_tokens(model, rows, monkeypatch):
    """A control: the tests above would notice."""
    monkeypatch.setattr(snapshots, "_tail", lambda seq, ids, first: (ids.tobytes(), b"" if first else seq.cache_key))
    calls, expected = with_equal_ids(model, *rows)
    both = {name: torch.cat([calls[0][name], calls[1][name]]) for name in calls[0]}
    hf_paged.enable(model, strict=True, block_size=16)
    assert not torch.equal(model.generate(**both, **NEW)[1:], expected[1])


def test_two_turns_with_images_in_any_order(model, monkeypatch):
    """A second turn goes on from the answer's end; the first one with its images in another order does not."""
    first = image_call(model, [[5, "0", 3, "4", 6]])
    hf_paged.enable(model, strict=True)
    answer = assert_native_parity(model, **first, max_new_tokens=12)[0, first["input_ids"].shape[1] :].tolist()
    length, found = first["input_ids"].shape[1] + len(answer), cached_tokens(monkeypatch)
    text = image_call(model, [[14]])["input_ids"][0, 1:].tolist()
    calls = [image_call(model, [[text[:5], one, text[5:8], two, text[8:], answer, 3, "1", 2]])
             for one, two in ("04", "40", "04")]
    for call in calls:
        assert_native_parity(model, **call, **NEW)
    assert found == [length - 1, 0, calls[0]["input_ids"].shape[1] - 1]


def test_packed_prompts_are_fed(qwen, forwards):
    """Beside text, in chunks, and the second time from states."""
    call = image_call(qwen, [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["1", 1, "1", "2", "0"], [30]])
    expected = stock_generate(qwen, **call, **NEW)
    for options in ({}, {"max_num_batched_tokens": 13, "max_num_seqs": 4}):
        del forwards[:]
        hf_paged.enable(qwen, strict=True, **options)
        for _ in range(2):
            assert_native_parity(qwen, expected, **call, **NEW)
        assert any(len(rows) > 1 and max(rows) > 1 for rows in forwards)
        hf_paged.disable(qwen)


def test_rows_of_one_prompt_with_an_image_go_on_from_one_state(qwen, forwards, monkeypatch):
    call = image_call(qwen, [[15, "0", 6], [15, "4", 6]]) | {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    length, found = call["input_ids"].shape[1], cached_tokens(monkeypatch)
    expected = stock_generate(qwen, **call, **NEW)
    assert_native_parity(hf_paged.enable(qwen, strict=True), expected, **call, **NEW)
    assert sorted(found) == [0, 0, *[length - 1] * 4]


def test_decode_rows_are_graphs_with_the_positions_of_their_axes(qwen, monkeypatch):
    """Also while prompts with images come: of two rows at once, five prompts."""
    steps = uncaptured(monkeypatch)
    call = image_call(qwen, [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["1", 1, "1", "2", "0"], [5, "4", 6]])
    expected = stock_generate(qwen, **call, **NEW)
    hf_paged.enable(qwen, strict=True, max_num_seqs=2, max_num_batched_tokens=64)
    for _ in range(2):
        assert_native_parity(qwen, expected, **call, **NEW)
    assert {kind for kind, _ in steps} == {"decode"} and len(steps) >= 2 * 5


def test_a_prompt_may_end_on_an_image(model, monkeypatch):
    """Its last token is fed a vector in the forward of decode rows; a control leaves it out there."""
    call = image_call(model, [[4, "1"]] * 2)
    call = {name: value[:, :-1] if value.shape == call["input_ids"].shape else value for name, value in call.items()}
    expected = stock_generate(model, **call, **NEW)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **call, **NEW)
    of = FedRows.of

    def without_rows_of_decodes(self, plan, device):
        fed = of(self, plan, device)
        return fed if fed is None or plan.num_decode_rows < len(plan.slots) else fed._replace(rows={})

    monkeypatch.setattr(FedRows, "of", without_rows_of_decodes)
    hf_paged.disable(model)
    hf_paged.enable(model, strict=True)
    assert not torch.equal(model.generate(**call, **NEW), expected)
