"""`hf_paged.trace`: the file says what ran, step by step and request by request."""

from __future__ import annotations

import functools
import json
import os
import threading
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from support import batch, in_child, random_prompts, run_out, tiny_model
from threads import run_threads
from trace_events import names, read, tracks
from transformers import GenerationConfig

import hf_paged
from hf_paged import Engine, PagedConfig, PagedGenerator
from hf_paged.engine import engine_registry
from hf_paged.engine import loop as loop_module
from hf_paged.observe.trace_file import TraceFile
from hf_paged.runner import device_times

GREEDY = {"do_sample": False, "eos_token_id": None}
shared_model = functools.cache(tiny_model)


def greedy(count):
    return GenerationConfig(max_new_tokens=count, **GREEDY)


def engine_of(**settings):
    return Engine(shared_model(), PagedConfig(max_num_seqs=4, **settings))


def lives(events):
    """By the name of its track, the events of each request."""
    titles = {pid for pid, name in names(events, "process_name").items() if name.startswith("requests of")}
    of_track = names(events, "thread_name")
    return {of_track[key]: track for key, track in tracks(events).items() if key[0] in titles}


def spans(track):
    return [event["name"] for event in track if event["ph"] == "X"]


def test_every_step_and_every_request_is_there(tmp_path):
    path = tmp_path / "steps.json"
    prompts = random_prompts([40, 7, 23])
    with PagedGenerator(tiny_model(), max_num_batched_tokens=16, max_num_seqs=3) as generator:
        before = generator.engine.stats()
        with hf_paged.trace(path):
            made = generator.generate(prompts, max_new_tokens=5, **GREEDY)
        after = generator.engine.stats()
    events = read(path)
    processes = names(events, "process_name")
    assert list(processes.values()) == ["engine 1: Qwen3ForCausalLM", "requests of engine 1"]
    [steps] = [pid for pid, name in processes.items() if name.startswith("engine 1")]
    on = {names(events, "thread_name")[key]: track for key, track in tracks(events).items() if key[0] == steps}
    assert list(on) == ["schedule", "launch", "wait", "commit", "emit"]  # no GPU
    num_steps = after.num_steps - before.num_steps
    expected = [f"step {i + 1}" for i in range(before.num_steps, after.num_steps)]
    assert {part: spans(track) for part, track in on.items()} == dict.fromkeys(on, expected)
    for one in range(num_steps):  # of each step the parts follow each other
        parts = [track[one] for track in on.values()]
        for first, then in pairwise(parts):
            assert first["ts"] + first["dur"] <= then["ts"] + 0.001
    assert sum(event["args"]["prompt_tokens"] for event in on["launch"]) == 70
    assert sum(event["args"]["tokens"] for event in on["commit"]) == 15
    requests = lives(events)
    assert len(requests) == 3
    for track, prompt, completion in zip(requests.values(), prompts, made, strict=True):
        assert [event["ph"] for event in track[:2]] == ["B", "X"] and track[1]["name"] == "queued"
        assert [(event["ph"], event["name"]) for event in track[-2:]] == [("i", "end"), ("E", track[0]["name"])]
        assert track[0]["args"] == {"prompt_tokens": len(prompt)}
        assert track[-1]["args"] == {"finish_reason": completion.finish_reason, "output_tokens": 5,
                                     "cached_tokens": 0, "preemptions": 0}
        chunks = [event["args"] for event in track if event["name"] == "prefill"]
        assert sum(chunk["tokens"] for chunk in chunks) == len(prompt)
        assert [chunk["start"] for chunk in chunks] == [sum(c["tokens"] for c in chunks[:i])
                                                        for i in range(len(chunks))]
        assert spans(track) == ["queued", *["prefill"] * len(chunks), "decode"]
    assert max(len(spans(track)) for track in requests.values()) > 4  # 40 tokens in chunks of 16


def test_counters_are_the_engines_own(tmp_path):
    path = tmp_path / "steps.json"
    engine = engine_of(num_blocks=32)
    seen = []
    with hf_paged.trace(path):
        for prompt in random_prompts([40, 20, 33]):
            engine.add_request(prompt, greedy(6))
        while engine.has_unfinished():
            engine.step()
            seen.append(engine.stats())
    events = read(path)
    counters = {name: [event["args"] for event in events if event["ph"] == "C" and event["name"] == name]
                for name in ("tokens per step", "requests", "KV blocks", "KV blocks by use", "KV bytes per step")}
    for key, total in (("read", engine.stats().kv_bytes_read), ("saved_by_groups", engine.stats().kv_bytes_saved)):
        assert sum(args[key] for args in counters["KV bytes per step"]) == total
    assert counters["KV bytes per step"][-1]["read"] > 0
    assert sum(args["prompt"] for args in counters["tokens per step"]) == 93
    assert sum(args["decode"] for args in counters["tokens per step"]) == 3 * 5
    assert counters["requests"][0] == {"running": 3, "waiting": 0}
    for args, stats in zip(counters["KV blocks"][:-1], seen[:-1], strict=True):  # after the last, all are free
        assert args == {"used": stats.num_blocks - 1 - stats.num_free_blocks, "free": stats.num_free_blocks}
    for args in counters["KV blocks by use"]:
        assert sum(args.values()) == 31 and args["shared"] == 0


def test_preempted_requests_wait_and_run_again(tmp_path):
    path = tmp_path / "steps.json"
    with PagedGenerator(tiny_model(), num_blocks=9, max_num_seqs=4) as generator:
        with hf_paged.trace(path):
            generator.generate(random_prompts([30, 30, 30]), max_new_tokens=40, **GREEDY)
        stats = generator.engine.stats()
    assert stats.num_preemptions > 0
    requests = lives(read(path))
    assert sum(track[-1]["args"]["preemptions"] for track in requests.values()) == stats.num_preemptions
    for track in requests.values():
        lost = [event["dur"] for event in track if event["name"] == "preempted"]
        assert len(lost) == track[-1]["args"]["preemptions"] and all(dur > 0 for dur in lost)
        for first, then in pairwise(spans(track)):
            assert then in {"queued": ("prefill",), "preempted": ("prefill",), "prefill": ("prefill", "decode"),
                            "decode": ("preempted",)}[first]


def test_lockstep_rows_and_other_engines_and_threads(tmp_path):
    """Engines that were there and one that comes meanwhile, of several threads; beams are rows of steps."""
    path = tmp_path / "steps.json"
    first, second = (hf_paged.enable(tiny_model()) for _ in range(2))
    with hf_paged.trace(path):
        third = hf_paged.enable(tiny_model())
        calls = [(first, {}), (second, {"num_beams": 2}), (third, {})]
        threads = [threading.Thread(target=lambda model=model, more=more: model.generate(
            **batch([9, 12]), max_new_tokens=4, do_sample=False, **more)) for model, more in calls]
        run_threads(threads)
    events = read(path)
    processes = names(events, "process_name")
    assert len([name for name in processes.values() if ": Qwen3ForCausalLM" in name]) == 3
    assert len([event for event in events if event["ph"] == "B"]) == 4  # two of each native call
    beams = [event["args"]["lockstep_tokens"] for event in events if event["name"].startswith("step ")
             and "lockstep_tokens" in event["args"] and event["args"]["lockstep_tokens"]]
    assert set(beams) == {4} and len(beams) == 3  # two beams of two rows, each step after the prompt's


def test_nested_and_crossing_traces_have_files_of_their_own(tmp_path):
    model = hf_paged.enable(tiny_model())

    def call():
        model.generate(**batch([9]), max_new_tokens=3, do_sample=False)

    with hf_paged.trace(tmp_path / "outer.json"):
        call()
        with hf_paged.trace(tmp_path / "inner.json"):
            call()
            with pytest.raises(ValueError, match="no other trace writes to"), hf_paged.trace(tmp_path / "outer.json"):
                pass
        call()
    found = {name: [event["name"] for event in read(tmp_path / f"{name}.json") if event["ph"] == "B"]
             for name in ("outer", "inner")}
    assert len(found["outer"]) == 3 and found["inner"] == found["outer"][1:2]
    with hf_paged.trace(tmp_path / "outer.json"):  # it is free again
        pass
    assert read(tmp_path / "outer.json") == []


def test_requests_that_outlive_the_block_are_unfinished_and_older_ones_have_no_track(tmp_path):
    engine = engine_of()
    old = engine.add_request([5, 6, 7], greedy(4))
    engine.step()
    with hf_paged.trace(tmp_path / "steps.json"):
        new = engine.add_request([8, 9, 10], greedy(50))
        aborted = engine.add_request([8, 9, 11], greedy(50))
        for _ in range(4):
            engine.step()
        engine.abort(aborted)
    requests = lives(read(tmp_path / "steps.json"))
    assert {name: track[-1]["args"]["finish_reason"] for name, track in requests.items()} == {
        new: "unfinished", aborted: "abort",
    }
    assert old not in requests and spans(requests[new]) == ["queued", "prefill", "decode"]
    run_out(engine)


def test_a_model_that_changes_sends_its_requests_back(tmp_path):
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    with hf_paged.trace(tmp_path / "steps.json"):
        name = engine.add_request([5, 6, 7], greedy(6))
        engine.step()
        engine.step()
        with engine.weight_update(), torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        run_out(engine)
    assert spans(lives(read(tmp_path / "steps.json"))[name]) == ["queued", "prefill", "decode", "preempted", "prefill",
                                                                 "decode"]


def test_an_interrupt_has_requests_start_over(tmp_path):
    engine = engine_of()
    with hf_paged.trace(tmp_path / "steps.json"):
        name = engine.add_request([5, 6, 7], greedy(6))
        engine.step()
        with patch.object(loop_module.EngineCore, "_commit", side_effect=KeyboardInterrupt), \
                pytest.raises(KeyboardInterrupt):
            engine.step()
        run_out(engine)
    track = lives(read(tmp_path / "steps.json"))[name]
    assert spans(track) == ["queued", "prefill", "decode", "queued", "prefill", "decode"]
    assert track[-1]["args"]["finish_reason"] == "length"


def test_nothing_is_made_while_nobody_traces(tmp_path):
    """After a trace the engine is as before: no observer, no clock, no event."""
    engine = engine_of()
    with hf_paged.trace(tmp_path / "steps.json"):
        engine.add_request([5, 6, 7], greedy(3))
        engine.step()
    assert not engine._core.observers.all and not engine_registry._makers and not device_times._askers
    with patch.object(loop_module, "Launched", side_effect=AssertionError), \
            patch.object(loop_module, "Committed", side_effect=AssertionError):
        run_out(engine)
    assert not Engine(shared_model(), PagedConfig())._core.observers.all


def test_a_block_that_raises_leaves_a_whole_file(tmp_path):
    model = hf_paged.enable(tiny_model())
    def fail(_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), hf_paged.trace(tmp_path / "steps.json"):
        fail(model.generate(**batch([9]), max_new_tokens=3, do_sample=False))
    assert len(lives(read(tmp_path / "steps.json"))) == 1


def test_a_disk_that_fills_up_ends_no_call_and_is_told_at_the_end(tmp_path):
    model = hf_paged.enable(tiny_model())
    expected = model.generate(**batch([9]), max_new_tokens=80, do_sample=False)
    made = []
    with patch.object(TraceFile, "_flush", side_effect=OSError(28, "no space")), \
            pytest.raises(OSError, match="no space"), hf_paged.trace(tmp_path / "steps.json"):
        made.append(model.generate(**batch([9]), max_new_tokens=80, do_sample=False))
    assert torch.equal(made[0], expected)
    with hf_paged.trace(tmp_path / "steps.json"):  # nobody writes to it any more
        pass
    with pytest.raises(FileNotFoundError), hf_paged.trace(tmp_path / "no" / "steps.json"):
        pass
    assert not device_times._askers and not engine_registry._makers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_no_engine_is_watched_any_more_where_the_end_cannot_be_written(tmp_path):
    engines = [engine_of(), engine_of()]

    def fails(*args, **kwargs):
        raise OSError("no space left")

    traced = hf_paged.trace(tmp_path / "steps.json")
    traced.__enter__()
    for engine in engines:
        engine.add_request([1, 2, 3], greedy(2))  # which outlives the block
    with patch.object(TraceFile, "end", fails), pytest.raises(OSError, match="no space left"):
        traced.__exit__(None, None, None)
    assert not any(engine._core.observers.all for engine in engines)


def test_a_fork_writes_nothing_into_the_parents_file(tmp_path):
    model = hf_paged.enable(tiny_model())
    path = tmp_path / "steps.json"
    with hf_paged.trace(path):
        model.generate(**batch([9]), max_new_tokens=3, do_sample=False)

        def generate():
            assert engine_registry._engines and not engine_registry._makers
            model.generate(**batch([9]), max_new_tokens=300, do_sample=False)

        assert in_child(generate) == 0
    assert len(lives(read(path))) == 1


def test_a_file_without_its_end_can_be_read(tmp_path):
    """As a viewer does: what a process that died had written is an array but for its bracket."""
    file = TraceFile(tmp_path / "steps.json")
    for i in range(1000):
        file.instant(1, 1, "x", file._began + i)
    written = (tmp_path / "steps.json").read_text()
    assert len(json.loads(written + "]")) >= 700
    file.close()
    file.instant(1, 1, "late", 0.0)
    file.close()
    assert [event["ts"] for event in read(tmp_path / "steps.json")] == [i * 1e6 for i in range(1000)]
