"""The command itself: what it says of its commands, how quickly, and where it goes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import hf_paged
from hf_paged import cli
from hf_paged.config import read_pairs

ASK_FOR_HELP = """
import sys
from hf_paged.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("status", end.code)
print({"torch", "transformers", "triton", "numpy", "matplotlib"} & set(sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "latency", "--help"], ["check", "--help"],
                                       ["serve", "--help"]])
def test_help_comes_at_once_and_imports_nothing_slow(arguments):
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        made = subprocess.run([sys.executable, "-c", ASK_FOR_HELP, *arguments], capture_output=True, text=True,
                              env={"PYTHONPATH": ":".join(filter(None, sys.path))})
        taken.append(time.perf_counter() - started)
    assert made.stdout.endswith("status 0\nset()\n"), made.stdout + made.stderr
    assert min(taken) < 1.0


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert [name for name in ("check", "bench", "serve") if f"    {name} " not in said] == []
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hf_paged {hf_paged.__version__}\n"


def test_serve_reads_its_arguments_and_serves(monkeypatch):
    found = []
    monkeypatch.setattr("hf_paged.cli.serve", lambda arguments: found.append(arguments) or 0)
    assert cli.main(["serve", "MODEL", "--adapter", "a=b", "--port", "1", "--max-model-len", "7"]) == 0
    [given] = found
    assert (given.model, given.adapter, given.port, given.engine_max_model_len) == ("MODEL", ["a=b"], 1, 7)


def test_what_goes_wrong_is_one_line_and_status_2(capsys, tmp_path):
    assert cli.main(["check", str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-paged: ") and "nothing" in said and "Traceback" not in said
    assert cli.main(["check", str(tmp_path), "--set", "block_size"]) == 2
    assert capsys.readouterr().err == "hf-paged: 'block_size': expected NAME=VALUE\n"


def test_values_of_pairs_are_json_where_they_are():
    assert read_pairs(["a=1", "b=0.5", "c=true", "d=True", "e=None", "f=flash_attn", "g=[1, 2]", "h=x=y"]) == {
        "a": 1, "b": 0.5, "c": True, "d": True, "e": None, "f": "flash_attn", "g": [1, 2], "h": "x=y",
    }
