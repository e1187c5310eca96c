"""examples/lora_adapters.py: stock's tokens, and a cached prefix for each adapter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from module_files import load_module

pytest.importorskip("peft", reason="an extra of the test environment")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lora_adapters.py"


def test_what_it_prints(capsys):
    load_module(EXAMPLE).main()
    said = capsys.readouterr().out
    assert "the path of this call: native" in said
    assert "same tokens as stock generate: True" in said
    cached = [int(number) for number in re.findall(r"(\d+) cached tokens", said)]
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) >= 32
    answers = re.findall(r"-> (.*)", said)
    assert "4821" in answers[0] and "4821" in answers[2] and answers[1] not in (answers[0], answers[2])
    assert answers[3:] == answers[:3]
