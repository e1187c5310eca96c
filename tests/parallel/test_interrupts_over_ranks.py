"""After Ctrl-C a generator over several ranks goes on with the ranks that it has: no call is wrong, none hangs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_model

SCRIPT = Path(__file__).with_name("interrupt_script.py")


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_twenty_interrupts_at_random_times(tmp_path, overlap):
    """Of plain, streamed and stepped calls, of tensors and around an update; in half of the rounds beside another
    thread's call, which goes on."""
    tiny_model(vocab_size=2600).save_pretrained(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(int(overlap))]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert made.returncode == 0, made.stdout + made.stderr[-6000:]
    assert list(ast.literal_eval(made.stdout).values()) == [4] * 5, made.stdout
