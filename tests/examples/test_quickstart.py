"""examples/quickstart.py: stock's tokens, a batch on which the engine has a plain advantage, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path

from module_files import load_module

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"


def test_what_it_prints(capsys):
    example = load_module(EXAMPLE)
    example.NUM_RUNS = 1
    example.main()
    printed = capsys.readouterr().out
    assert "same tokens as stock generate: True" in printed
    assert re.search(r"on 48 chats of 206 tokens: stock [\d.]+ s, paged [\d.]+ s \([\d.]+ times as fast\)", printed)
    # What the advantage comes from; the times themselves depend on what else the machine does.
    stock, paged = (int(count.replace(",", "")) for count in
                    re.search(r"prompt tokens computed: stock ([\d,]+), paged ([\d,]+)", printed).groups())
    assert stock == 48 * 206 and paged < stock / 10
    for name, code in example.FACTS.items():
        assert re.search(rf"What is the code of {name}\? +-> {name}: {code}   \(eos\)", printed)
    assert "streamed: red-fox: 4821" in printed
