"""A second process of a model begins with the kernels and shapes that the first needed; a file that is no manifest
changes nothing."""

from __future__ import annotations

import json

import pytest

from hf_paged.kernels.attention.types import GroupedConfig
from hf_paged.kernels.build import kernel_log
from hf_paged.runner.manifest import IdleSaver, Manifest
from hf_paged.runner.step_shape import GroupedTiles, StepShape

TILES = GroupedTiles(3, GroupedConfig(16, 64, 3, 32, 2, 4, 2, None))
SHAPES = (
    StepShape("decode", rows=8, stages=frozenset({"top_p", "edits"}), scored=("raw",), named=True, tiles=TILES),
    StepShape("mixed", rows=4, tokens=2048, prompts=3, long=True, queued=True, decode_tiles=TILES),
    StepShape("logits", rows=1, one_launch=True),
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_log, "_variants", {})
    return tmp_path / "hf_paged" / "file.json"


def saved(path, *shapes, variants=()):
    manifest = Manifest(path)
    for record in variants:
        kernel_log.note_variant(record)
    manifest.uses.update(shapes)
    manifest.save()
    return Manifest(path)


def test_shapes_and_kernels_come_back_as_they_were(path):
    found = saved(path, *SHAPES, SHAPES[0], variants=["one", "two"])
    assert found.shapes == {SHAPES[0]: 2, SHAPES[1]: 1, SHAPES[2]: 1}
    assert found.variants == ["two", "one"] and [one.name for one in path.parent.iterdir()] == ["file.json"]
    assert saved(path, StepShape("decode", rows=2)).shapes[SHAPES[0]] == 1  # the uses of an earlier process fade


def test_shapes_that_were_used_often_enough_for_a_graph_are_repeated(path):
    once, prompts = StepShape("decode", rows=1), StepShape("prompts", tokens=16, prompts=2)
    assert saved(path, once, *[SHAPES[0]] * 2, *[prompts] * 2, *[SHAPES[1]] * 3).repeated() == [SHAPES[1], SHAPES[0]]


def test_a_graph_of_this_process_is_no_part_of_a_shape(path):
    shape = StepShape("masked", rows=2, after=object())
    assert list(saved(path, shape).shapes) == [shape._replace(after=None)]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7", '{"format": 99}', '{"format": 1, "variants": 3}',
                                     '{"format": 1, "variants": [], "shapes": [[{"rows": "many"}, 1]]}',
                                     '{"format": 1, "variants": [], "shapes": [[{"kind": "decode", "no": 1}, 1]]}',
                                     "[" * 100_000, "\x00",
                                     '{"format": 1, "variants": ["one"], "shapes": []}' + " " * (5 << 20)])
def test_a_damaged_file_counts_as_empty_and_is_replaced(path, content):
    path.parent.mkdir()
    path.write_text(content)
    assert (Manifest(path).variants, Manifest(path).shapes) == ([], {})
    assert saved(path, SHAPES[0]).shapes == {SHAPES[0]: 1}


def test_what_is_no_record_is_left_out(path):
    path.parent.mkdir()
    path.write_text(json.dumps({"format": 1, "variants": [1, None, "one", ["two"]], "shapes": []}))
    assert Manifest(path).variants == ["one"]


def test_a_file_that_cannot_be_written_costs_nothing(path):
    path.parent.write_text("a file where the folder should be")
    manifest = Manifest(path)
    manifest.uses[SHAPES[0]] += 1
    manifest.save()
    assert path.parent.is_file() and not manifest.has_news()


def test_a_rank_that_only_reads_writes_nothing(path):
    manifest = Manifest(path, is_read_only=True)
    manifest.uses[SHAPES[0]] += 1
    manifest.save()
    assert not path.exists()


def test_two_processes_add_to_one_file_of_bounded_size(path):
    first, second = Manifest(path), Manifest(path)
    for manifest, name in ((first, "first"), (second, "second")):
        for number in range(400):
            kernel_log.note_variant(f"{name} {number}")
        manifest.save()
        kernel_log._variants.clear()
    found = Manifest(path).variants
    assert len(found) == 512 and found[0] == "second 399" and found[-1] == "first 288"


def test_news_are_saved_once_when_the_engine_has_been_idle(path, monkeypatch):
    made = []

    class Timer:
        def __init__(self, seconds, action):
            self.action, self.is_over = action, False
            made.append(self)

        def start(self):
            pass

        def cancel(self):
            self.is_over = True

    monkeypatch.setattr("hf_paged.runner.manifest.threading.Timer", Timer)
    manifest = Manifest(path)
    saver = IdleSaver(Timer, manifest)
    saver.note(is_busy=False)
    assert not made, "there is nothing new"
    manifest.uses[SHAPES[0]] += 1
    for is_busy in (True, False, False):
        saver.note(is_busy)
    assert len(made) == 1
    saver.note(is_busy=True)
    assert made[0].is_over, "requests came in between"
    saver.note(is_busy=False)
    made[1].action()
    assert Manifest(path).shapes == {SHAPES[0]: 1}
    for is_busy in (True, False):
        saver.note(is_busy)
    assert len(made) == 2
    saver.close()
