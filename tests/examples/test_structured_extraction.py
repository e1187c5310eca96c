"""examples/structured_extraction.py: every answer has its form, and a bad form is its prompt's alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from module_files import load_module

pytest.importorskip("xgrammar", reason="of the extra `structured`")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "structured_extraction.py"


def test_what_it_prints(capsys):
    example = load_module(EXAMPLE)
    example.main()
    said = capsys.readouterr().out
    made = [ast.literal_eval(text) for text in re.findall(r"JSON: (\{.*\}) eos", said)]
    assert len(made) == 3
    assert all(one["name"] in example.FACTS and re.fullmatch("[0-9]{4}", one["code"]) for one in made)
    texts = dict(re.findall(r"^(\{.*\}|None) -> '(.*)'$", said, re.MULTILINE))
    assert re.fullmatch("[0-9]{4}", texts["{'regex': '[0-9]{4}'}"])
    assert "1937" in texts["None"]
    assert texts["{'choice': ['I know', 'I do not know']}"] in ("I know", "I do not know")
    assert re.search(r"error: FormError: structured=.*Unclosed", said) and said.count("\ntext: ") == 2
    for beams in re.findall(r"beam\(s\): (\[.*\])", said):
        assert all(re.fullmatch("[0-9]{4}", text) for text in ast.literal_eval(beams))
    assert said.count("beam(s)") == 2
