"""Ray Data actors complete a dataset's rows as one generator does, whatever dies, and the example goes on where it was.

One local Ray serves the tests that start a pipeline; each starts processes that import torch, so there are few.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.data")

import pyarrow as pa
import pyarrow.parquet
import ray

from hf_paged import PagedGenerator, UnsupportedOptionError
from hf_paged import ray_data as paged_ray
from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.ray_data import PagedActor, generate_dataset, row_seed

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "ray_batch.py"
SAMPLED = {"max_new_tokens": 8, "do_sample": True, "temperature": 5.0}  # the trained model is very sure of itself
SETTINGS = {"dtype": "float32", "num_blocks": 512}


@pytest.fixture(scope="module")
def cluster():
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    patch.setenv("OMP_NUM_THREADS", "1")
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR",
             log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    yield
    ray.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
def generator(trained_path):
    with PagedGenerator.from_pretrained(trained_path, **SETTINGS) as generator:
        yield generator


@pytest.fixture(scope="module")
def actor(trained_path):
    return PagedActor(trained_path, id_column="id", seed=3, generate_kwargs=SAMPLED, **SETTINGS)


def expected_rows(generator: PagedGenerator, rows: list[dict[str, Any]], seed: int, settings: dict[str, Any]) -> Any:
    """What one generator makes of all rows in one call, by id."""
    made = generator.generate([row["prompt"] for row in rows], seed=[row_seed(row["id"], seed) for row in rows],
                              **settings)
    return {row["id"]: {**row, "completion": c.text, "completion_token_ids": c.token_ids,
                        "completion_finish_reason": c.finish_reason, "completion_error": None}
            for row, c in zip(rows, made, strict=True)}


def by_id(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "a row came twice"
    return found


# -- an actor, without Ray -----------------------------------------------------------------------------------------


def test_an_actor_completes_any_split_of_the_rows_alike_and_bad_rows_end_alone(actor, generator):
    rows = [{"id": i, "prompt": f"Repeat: owl red {'swan ' * (i % 4)}"} for i in range(9)]
    expected = expected_rows(generator, rows, 3, SAMPLED)
    assert len({tuple(row["completion_token_ids"]) for row in expected.values()}) == 9  # equal prompts, own draws
    whole = actor(pa.Table.from_pylist(rows))
    assert by_id(whole.to_pylist()) == expected
    bad = [{"id": 97, "prompt": ""}, {"id": 98, "prompt": None}, {"id": None, "prompt": "owl"},
           {"id": 99, "prompt": "owl " * 5000}]
    parts = [actor(pa.Table.from_pylist([*rows[4:], *bad])), actor(pa.Table.from_pylist(rows[:4])),
             actor(pa.table({"id": pa.array([1], pa.int64()), "prompt": [""]}))]
    assert all(part.schema.types == whole.schema.types for part in parts)  # errors or none, the types stay
    made = [row for part in parts for row in part.to_pylist()]
    assert by_id([row for row in made if row["completion_error"] is None]) == expected
    failed = [row for row in made if row["completion_error"] is not None]
    assert [row["id"] for row in failed] == [97, 98, None, 99, 1]
    for row, reason in zip(failed, ("at least one token id", "NoneType", "row id None", "max_model_len", "at least"),
                           strict=True):
        assert reason in row["completion_error"]
        assert (row["completion"], row["completion_token_ids"], row["completion_finish_reason"]) == (None, [], "error")


@pytest.mark.parametrize("prompts", [
    [[860, 1, 2], [5, 6]],
    [[{"role": "user", "content": "Repeat: owl"}], [{"role": "user", "content": "What is 31 + 5?"}]],
])
def test_token_ids_and_chats(prompts, actor, generator):
    rows = [{"id": f"row {i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
    assert by_id(actor(pa.Table.from_pylist(rows)).to_pylist()) == expected_rows(generator, rows, 3, SAMPLED)


def test_columns_are_checked(actor):
    with pytest.raises(ValueError, match=r"prompt_column='prompt': expected one of the dataset's columns, \['id'"):
        actor(pa.table({"id": [1], "text": ["owl"]}))
    with pytest.raises(ValueError, match="id_column='id'"):
        actor(pa.table({"prompt": ["owl"]}))
    with pytest.raises(ValueError, match=r"the dataset has columns \['completion_error'\] already"):
        actor(pa.table({"id": [1], "prompt": ["owl"], "completion_error": [None]}))


@pytest.mark.parametrize("error", [WorkerDiedError, EngineClosedError])
def test_a_broken_engine_is_no_rows_error(error, actor, monkeypatch):
    """Outside of Ray it is raised; rows that could run on another engine do not come back as failed."""
    for name in ("check_prompt", "check_prompts"):
        monkeypatch.setattr(actor._generator.engine, name, lambda ids: (_ for _ in ()).throw(error("gone")))
    with pytest.raises(error, match="gone"):
        actor(pa.table({"id": [1], "prompt": ["owl"]}))


def test_a_column_of_adapters(trained_path, tmp_path):
    """Each row under its own; a name that the checkpoint lacks ends its row alone."""
    pytest.importorskip("peft", reason="an extra of the test environment")
    from lora_models import with_adapter
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wrapped = with_adapter(AutoModelForCausalLM.from_pretrained(trained_path, dtype="float32"), "default", 5)
    wrapped.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(trained_path).save_pretrained(tmp_path)
    settings = {"max_new_tokens": 6}
    actor = PagedActor(str(tmp_path), adapter_column="adapter", generate_kwargs=settings, **SETTINGS)
    names = ["default", "__base__", None, "nope"]
    made = actor(pa.table({"prompt": ["a red fox"] * 4, "adapter": names})).to_pylist()
    ids = AutoTokenizer.from_pretrained(trained_path)("a red fox", return_tensors="pt")
    width = ids["input_ids"].shape[1]
    expected = [wrapped.generate(**ids, **settings, adapter_names=[name])[0, width:].tolist()
                for name in ("default", "__base__", "default")]
    assert expected[0] != expected[1]
    assert [row["completion_token_ids"] for row in made[:3]] == expected
    assert made[3]["completion_finish_reason"] == "error" and "'nope'" in made[3]["completion_error"]
    with pytest.raises(ValueError, match="adapter_column='adapter'"):
        actor(pa.table({"prompt": ["a"]}))
    one = PagedActor(str(tmp_path), generate_kwargs=settings | {"adapter_names": "__base__"}, **SETTINGS)
    assert one(pa.table({"prompt": ["a red fox"]})).to_pylist()[0]["completion_token_ids"] == expected[1]
    with pytest.raises(ValueError, match="'nope'"):
        PagedActor(str(tmp_path), generate_kwargs={"adapter_names": "nope"}, **SETTINGS)
    with pytest.raises(ValueError, match="adapter_column"):
        PagedActor(str(tmp_path), adapter_column="a", generate_kwargs={"adapter_names": "default"}, **SETTINGS)



def test_keywords_of_the_template_and_on_error(trained_path):
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}", "mark": " owl"}
    keywords = {"max_new_tokens": 3, "chat_template_kwargs": template}
    chats = [[{"role": "user", "content": "owl"}], [{"role": "user", "content": "fox"}]]
    actor = PagedActor(trained_path, generate_kwargs=keywords, **SETTINGS)
    made = actor(pa.table({"prompt": chats})).to_pylist()
    expected = actor._generator.generate(["owl owl", "fox owl"], max_new_tokens=3)
    assert [row["completion_token_ids"] for row in made] == [c.token_ids for c in expected]
    for parts in ([3, 4], chats[0]):  # rows that are parts of one prompt
        made = actor(pa.table({"prompt": parts})).to_pylist()
        assert {row["completion_finish_reason"] for row in made} == {"error"}
    actor._generator.close()
    strict = PagedActor(trained_path, generate_kwargs={"max_new_tokens": 3}, on_error="raise", **SETTINGS)
    prompts = [{"prompt": "owl", "prompt_token_ids": None}, {"prompt": None, "prompt_token_ids": [5, 6]}]
    assert [row["completion_error"] for row in strict(pa.table({"prompt": prompts})).to_pylist()] == [None, None]
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        strict(pa.table({"prompt": ["owl", ""]}))
    strict._generator.close()
    with pytest.raises(ValueError, match="on_error='drop'"):
        PagedActor(trained_path, on_error="drop", **SETTINGS)


@pytest.mark.parametrize(("arguments", "error", "match"), [
    ({"generate_kwargs": {"num_return_sequences": 2, "do_sample": True}}, ValueError, "num_return_sequences=2"),
    ({"generate_kwargs": {"num_beams": 2}}, UnsupportedOptionError, "num_beams=2"),
    ({"generate_kwargs": {"max_new_tokenz": 2}}, ValueError, "max_new_tokenz"),
    ({"seed": -1}, ValueError, "seed=-1"),
])
def test_settings_that_no_row_can_run_with_are_refused_at_once(arguments, error, match, trained_path):
    with pytest.raises(error, match=match):
        PagedActor(trained_path, **arguments, **SETTINGS)


def test_a_row_seed_follows_from_the_key_and_the_seed_alone():
    assert row_seed("owl") == 8683977322524881085  # on every machine
    assert row_seed(7) == row_seed(np.int32(7)) != row_seed("7")
    assert row_seed([1, 2]) == row_seed(np.array([1, 2]))
    keys = [*range(500), *map(str, range(500)), [{"role": "user", "content": "ä"}], "ä", "a\ud800"]
    assert len({row_seed(key, seed) for key in keys for seed in (0, 1)}) == 2 * len(keys)
    assert all(0 <= row_seed(key) < 2**63 for key in keys)
    for key in (None, float("nan"), b"7"):
        with pytest.raises(TypeError, match="expected an integer or a string"):
            row_seed(key)


# -- Ray Data ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_row_is_lost_or_doubled_when_an_actor_is_killed(cluster, generator, trained_path, tmp_path, monkeypatch):
    """Two actors, of which one is killed with completions in hand that nobody got, and one loses a rank of its model;
    and a bad row among the others."""

    def first(what: str) -> bool:
        try:
            os.close(os.open(tmp_path / what, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    class KilledOnce(PagedActor):
        def __call__(self, batch: pa.Table) -> pa.Table:
            made = super().__call__(batch)
            if 10 in batch.column("id").to_pylist() and first("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        def _generate(self, requests: Any) -> Any:
            if first("rank died"):
                raise WorkerDiedError("rank 1 ended with -9")
            return super()._generate(requests)

    monkeypatch.setattr(paged_ray, "PagedActor", KilledOnce)
    rows = [{"id": i, "prompt": f"Repeat: owl {'swan ' * (i % 5)}"} for i in range(24)]
    bad = {"id": 24, "prompt": ""}
    dataset = ray.data.from_arrow(pa.Table.from_pylist([*rows, bad]))  # one block, which is shared out
    made = generate_dataset(dataset, trained_path, num_actors=2, batch_size=3, id_column="id", seed=11,
                            generate_kwargs=SAMPLED, **SETTINGS)
    found = by_id(made.take_all())
    assert {file.name for file in tmp_path.iterdir()} == {"killed", "rank died"}
    assert "at least one token id" in found.pop(24)["completion_error"]
    expected = expected_rows(generator, rows, 11, SAMPLED)
    assert {key: {**row, "completion_token_ids": list(row["completion_token_ids"])} for key, row in found.items()} == \
        expected


def _rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for file in folder.iterdir():
        if file.suffix == ".parquet":
            rows += pyarrow.parquet.read_table(file).to_pylist()
        else:
            rows += map(json.loads, file.read_text().splitlines())
    return rows


@pytest.fixture(scope="module")
def ray_batch():
    """The example, whose functions travel to Ray's processes by value as those of `python examples/ray_batch.py` do."""
    spec = importlib.util.spec_from_file_location("ray_batch", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ray_batch"] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    yield module
    ray.cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["ray_batch"]


def test_the_example_finds_its_rows_whatever_their_texts_hold(ray_batch, tmp_path):
    """JSON lets U+2028 and its like stand in strings as they are."""
    rows = pa.table({"id": ["a", "b\u2028"], "completion": ["x\u2028y\x85z", "\x0b"],
                     "completion_error": pa.array([None, None], pa.string())})
    ray_batch.write_file(rows, str(tmp_path), "jsonl", "id")
    assert ray_batch.finished_ids(tmp_path, "id") == {"a", "b\u2028"}


@pytest.mark.slow
def test_the_example_goes_on_after_an_interruption(cluster, ray_batch, generator, tmp_path, capsys):
    """JSON lines to Parquet; one of the files is lost and one half-written: only their rows are made again, this time
    from Parquet to JSON lines."""
    rows = [json.loads(line) for line in (ROOT / "examples" / "prompts.jsonl").read_text().splitlines()]
    expected = expected_rows(generator, rows, 0, {"max_new_tokens": 32})
    output = tmp_path / "output"
    arguments = ["--output", str(output), "--dtype", "float32", "--batch-size", "4"]
    assert ray_batch.main([*arguments, "--format", "parquet"]) == 16
    assert by_id(_rows_of(output)) == expected
    files = sorted(output.iterdir())
    assert len(files) == 4
    assert {file.suffix for file in files} == {".parquet"}

    half_written = output / f".{files[1].name}.77"
    half_written.write_bytes(files[1].read_bytes()[:100])
    files[1].unlink()
    kept = {file: file.stat().st_mtime_ns for file in output.glob("part-*")}
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for half in (rows[:8], rows[8:]):
        pyarrow.parquet.write_table(pa.Table.from_pylist(half), prompts / f"{half[0]['id']}.parquet")
    assert ray_batch.main([*arguments, "--input", str(prompts), "--format", "jsonl"]) == 4
    assert not half_written.exists()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert any(file.suffix == ".jsonl" for file in output.iterdir())
    assert by_id(_rows_of(output)) == expected

    assert ray_batch.main(arguments) == 0
    assert "16 rows, 16 of them" in capsys.readouterr().out
    pyarrow.parquet.write_table(pa.table({"id": [1, 2, 1], "prompt": ["a", "b", "c"]}), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"no two alike; found \[1\]"):
        ray_batch.main(["--input", str(tmp_path / "twice.parquet"), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("name", ["num_actors", "batch_size", "tensor_parallel_size"])
def test_counts_are_checked(name):
    with pytest.raises(ValueError, match=f"{name}=0: expected an integer of at least 1"):
        generate_dataset(None, "nowhere", **{name: 0})


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-paged\[ray\]'"):
        generate_dataset(None, "nowhere")
