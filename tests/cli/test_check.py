"""`hf-paged check`: what it says of a model is what the model does, with weights and without."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from derived_models import derived_model
from family_models import family_model
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM, Qwen3Config

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.cli import main
from hf_paged.models import experts

TRAINED = Path(hf_paged.__file__).resolve().parents[1] / "examples/models/tiny-qwen3"


def checked(capsys, *arguments):
    """Exit status and report."""
    status = main(["check", *map(str, arguments), "--json", "--device", "cpu"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def config_alone(tmp_path):
    shutil.copy(TRAINED / "config.json", tmp_path)
    return tmp_path


def test_a_config_alone_says_what_the_model_does(capsys, config_alone):
    status, report = checked(capsys, config_alone, "--generate", "num_beams=2", "penalty_alpha=0.6", "top_k=4")
    whole_status, whole = checked(capsys, TRAINED, "--generate", "num_beams=2", "penalty_alpha=0.6", "top_k=4")
    loaded_status, loaded = checked(capsys, TRAINED, "--load", "--generate", "num_beams=2", "penalty_alpha=0.6",
                                    "top_k=4")
    assert status == whole_status == loaded_status == 0 and report == whole
    assert loaded == {**report, "is_loaded": True}
    model = AutoModelForCausalLM.from_pretrained(TRAINED)
    assert report["num_parameters"] == model.num_parameters() and report["dtype"] == str(model.dtype).split(".")[1]
    kwargs = {"greedy search": {}, "4 beams": {"num_beams": 4}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}
    for name, arguments in kwargs.items():
        explained = hf_paged.explain(model, do_sample=False, **arguments)
        assert report["calls"][name] == {"path": explained.path, "reasons": list(explained.reasons),
                                         "remedies": list(explained.remedies)}


def test_the_memory_is_what_a_generator_takes(capsys, config_alone):
    settings = {"max_num_seqs": 3, "max_model_len": 200, "block_size": 32}
    _, report = checked(capsys, config_alone, "--set", *[f"{name}={value}" for name, value in settings.items()])
    model = AutoModelForCausalLM.from_pretrained(TRAINED)
    with PagedGenerator(model, **settings) as generator:
        generator.engine.room(1)
        stats = generator.engine.stats()
    memory = report["memory"]
    assert (memory["num_blocks"], memory["kv_cache"]) == (stats.num_blocks, stats.kv_cache_bytes)
    assert memory["weights"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert (memory["max_model_len"], memory["num_longest"], memory["fits"]) == (200, 3, True)


def test_a_model_that_no_engine_runs(capsys, tmp_path):
    GPTNeoForCausalLM(GPTNeoConfig(num_layers=1, hidden_size=32, num_heads=2, vocab_size=64,
                                   attention_types=[[["global"], 1]])).config.save_pretrained(tmp_path)
    status, report = checked(capsys, tmp_path)
    assert status == 1 and report["layers"] == "stock" and report["memory"] is None
    assert {call["path"] for call in report["calls"].values()} == {"stock"}
    assert main(["check", str(tmp_path), "--device", "cpu"]) == 1
    assert "GPTNeoForCausalLM is not proved to run on the paged engine" in capsys.readouterr().out


def test_a_model_that_a_proof_lets_run(capsys, tmp_path):
    derived_model("Arcee", {}).config.save_pretrained(tmp_path)
    status, report = checked(capsys, tmp_path)
    assert status == 0 and report["layers"] == "generic" and report["memory"]["max_model_len"] == 512
    assert report["proof"] == "stock's numbers in sequences of up to 512 tokens and steps of up to 8,200"


def test_why_modules_compute_experts(capsys, tmp_path, monkeypatch):
    family_model("mixtral").config.save_pretrained(tmp_path)
    assert "the kernels need Triton" in checked(capsys, tmp_path, "--dtype", "bfloat16")[1]["experts"]
    monkeypatch.setattr(experts, "why_not_on", lambda device: None)
    assert checked(capsys, tmp_path, "--dtype", "bfloat16")[1]["experts"] is None


def test_the_weights_of_a_large_model_take_no_memory(capsys, tmp_path):
    config = Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=12, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=128, vocab_size=151936, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, report = checked(capsys, tmp_path, "--generate", "num_beams=2")
    assert status == 0 and report["memory"]["weights"] > 7e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # KiB


def test_the_page_for_a_terminal(capsys):
    assert main(["check", str(TRAINED), "--device", "cpu", "--generate", "output_attentions=true"]) == 0
    said = capsys.readouterr().out
    for part in ("model      Qwen3ForCausalLM, ", "weights not read", "fused: hf_paged's kernels",
                 "attention  torch on", "KV cache", "greedy search  native", "4 beams        lockstep",
                 "as asked       stock",
                 "output_attentions=True is not carried out by the paged engine"):
        assert part in said, part


def test_wrong_settings_are_named(capsys):
    assert main(["check", str(TRAINED), "--dtype", "float17"]) == 2
    assert "dtype='float17': expected" in capsys.readouterr().err
    assert main(["check", str(TRAINED), "--set", "block_size=17"]) == 2
    assert "block_size=17: expected a power of two" in capsys.readouterr().err
    assert main(["check", str(TRAINED), "--set", "bloc_size=16"]) == 2
    assert "bloc_size" in capsys.readouterr().err
    assert torch.get_default_dtype() is torch.float32
