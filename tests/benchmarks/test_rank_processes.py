"""Ranks of a benchmark: none is left, whatever one of them does."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from rank_processes import wait_or_kill


def start(*programs):
    return [subprocess.Popen([sys.executable, "-c", program], start_new_session=True) for program in programs]


@pytest.mark.parametrize(("programs", "seconds", "status"), [
    (("", ""), 60, 0), (("import time; time.sleep(600)", "raise SystemExit(3)"), 60, 1),
    (("import time; time.sleep(600)", ""), 0.5, 124),
])
def test_all_end(programs, seconds, status):
    ranks = start(*programs)
    assert wait_or_kill(ranks, time.monotonic() + seconds) == status
    assert all(rank.returncode is not None for rank in ranks)
