"""The command line of the server: settings of the engine, and its help."""

from __future__ import annotations

import pytest

from hf_paged.serve import main, split_settings


def engine(*settings):
    return [argument for setting in settings for argument in ("--engine", setting)]


def test_settings_are_taken_out_of_the_command_line():
    assert split_settings(["m", "--engine", "max_model_len=12", "--engine=on_weight_change=keep", "--port", "1"]) == (
        {"max_model_len": 12, "on_weight_change": "keep"}, ["m", "--port", "1"])


@pytest.mark.parametrize(("given", "expected"), [
    (["max_num_batched_tokens=100", "max_num_seqs=10"], {"max_num_batched_tokens": 100, "max_num_seqs": 10}),
    (["max_num_seqs=10", "max_num_batched_tokens=100"], {"max_num_batched_tokens": 100, "max_num_seqs": 10}),
    (["strict=True"], {"strict": True}), (["strict=true"], {"strict": True}), (["overlap=False"], {"overlap": False}),
    (["overlap=None"], {"overlap": None}), (["overlap=null"], {"overlap": None}),
    (["seed=1", "seed=2"], {"seed": 2}), ([], {}),
])
def test_settings_are_checked_together_and_read_as_python_or_json(given, expected):
    assert split_settings(engine(*given)) == (expected, [])


@pytest.mark.parametrize(("given", "said"), [
    (["max_model_len"], "'max_model_len': expected NAME=VALUE"), (["max_model_length=3"], "expected max_model_len"),
    (["max_model_len=-1"], "max_model_len=-1: expected"), (["max_model_len="], "max_model_len='': expected"),
    (["structured_max_seconds=soon"], "structured_max_seconds='soon': expected"), (["zzz=1"], "a field of PagedConfig"),
    (["num_gpu_blocks_override=3"], "write num_blocks="), (["strict=yes"], "strict='yes': expected one of True, False"),
    (["max_num_seqs=10", "max_num_batched_tokens=5"], "max_num_batched_tokens=5: expected at least 10"),
])
def test_settings_that_are_wrong_end_the_command(capsys, given, said):
    with pytest.raises(SystemExit) as ended:
        split_settings(engine(*given))
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_help_has_all_options(capsys, monkeypatch):
    pytest.importorskip("fastapi", reason="of the extra `serve`")
    monkeypatch.setattr("hf_paged.serve.install", lambda: None)
    monkeypatch.setattr("hf_paged.serve.install_serving", lambda adapters: None)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    found = capsys.readouterr().out
    assert ended.value.code == 0 and all(option in found for option in ("--adapter", "--engine", "--cb-num-blocks"))
