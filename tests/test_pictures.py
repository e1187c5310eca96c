"""Pictures of the cache: blocks have the color of who uses them, and numbers are the engine's own."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
import pytest
from support import batch, random_prompts, run_out, tiny_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import Engine, PagedConfig, pictures
from hf_paged.pictures import _CACHED, _FREE, _SHARED, CacheView, block_colors, use_over_time

shared_model = functools.cache(tiny_model)
CONFIG = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None)


@pytest.fixture
def running():
    """An engine in whose pool two requests share 32 tokens, one has none in common, and one has ended."""
    engine = Engine(shared_model(), PagedConfig(num_blocks=30, max_num_seqs=4))
    [ended, shared, other] = random_prompts([48, 32, 20])
    engine.add_request(ended, GenerationConfig(max_new_tokens=1, do_sample=False))
    run_out(engine)
    for name, prompt in (("a", [*shared, 5, 6]), ("b", [*shared, 7]), ("c", other)):
        engine.add_request(prompt, CONFIG, request_id=name)
    engine.step()
    return engine


def test_the_view_is_what_requests_hold(running):
    view, stats = running.cache_view(), running.stats()
    assert {name: len(blocks) for name, blocks in view.owners.items()} == {"a": 3, "b": 3, "c": 2}
    assert view.counts == {"private": 4, "shared": 2, "cached": 3, "free": 20}
    assert view.counts["private"] + view.counts["shared"] == stats.num_used_blocks
    assert view.owners["a"][:2] == view.owners["b"][:2]


def test_every_block_has_its_color(running):
    view = running.cache_view()
    palette = np.eye(3)  # a color for each of three
    colors = block_colors(view, palette)
    assert colors.shape == (29, 3)
    for block in view.owners["a"][:2]:
        assert tuple(colors[block - 1]) == _SHARED
    for name, color in zip("abc", palette, strict=True):
        own = [block for block in view.owners[name] if view.users[block - 1] == 1]
        assert own and (colors[np.array(own) - 1] == color).all()
    found = [tuple(color) for color in colors.tolist()]
    assert (found.count(_SHARED), found.count(_CACHED), found.count(_FREE)) == (2, 3, 20)


def test_rows_of_lockstep_calls_are_owners():
    model, seen = hf_paged.enable(tiny_model()), []
    engine = hf_paged.get_engine(model)

    class Looks(LogitsProcessor):
        def __call__(self, ids, scores):
            seen.append(engine.cache_view())
            return scores

    looks = LogitsProcessorList([Looks()])
    model.generate(**batch([20, 33]), max_new_tokens=3, do_sample=False, logits_processor=looks)
    assert list(seen[0].owners) == ["lockstep call 0, row 0", "lockstep call 0, row 1"]
    assert [len(blocks) for blocks in seen[0].owners.values()] == [2, 3]
    assert not engine.cache_view().owners


def test_the_picture_over_a_trace(running, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.json"
    with hf_paged.trace(path):
        run_out(running)
    [(title, times, columns)] = use_over_time(path)
    assert title == "engine 1: Qwen3ForCausalLM" and times == sorted(times)
    assert {sum(values) for values in zip(*columns.values(), strict=True)} == {29}
    assert columns["shared"][0] == 2 and columns["private"][-1] >= columns["private"][0]
    drawn = running.draw_cache(path)
    blocks, over_time = drawn.axes
    assert "29 blocks of 16 tokens: 0 used by 0, 0 of them shared" in blocks.get_title()
    assert over_time.get_title() == title and len(over_time.collections) == 4
    assert drawn._repr_png_().startswith(b"\x89PNG") and len(drawn._repr_png_()) > 5000
    written = path.read_text()
    path.write_text(written.rpartition(",\n")[0])  # of a process that died
    assert use_over_time(path)[0][0] == title


def test_a_picture_names_the_first_owners_and_counts_the_rest(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_paged.pictures import draw

    view = CacheView(np.ones(40, np.int32), np.zeros(40, bool), {f"r{i}": [i + 1] for i in range(40)}, 16)
    [panel] = draw(view, None).axes
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels[:2] == ["r0 (1)", "r1 (1)"] and labels[12:] == ["and 28 more", "shared", "cached", "free"]
    [empty] = draw(CacheView(np.empty(0, np.int32), np.empty(0, bool), {}, 16), None).axes
    assert empty.get_title().startswith("0 blocks")


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([]))
    with pytest.raises(ValueError, match=r"expected a file of hf_paged\.trace in which an engine made steps"):
        use_over_time(path)


def test_without_matplotlib_the_remedy_is_named(monkeypatch, running):
    pictures._figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-paged\[plot\]'"):
        running.draw_cache()
