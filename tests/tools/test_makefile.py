"""What the Makefile says of settings that it cannot take."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dry_run(*arguments):
    if shutil.which("make") is None:
        pytest.skip("no make")
    # A `make test` that runs this test hands its own options and level to every `make` below it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=60)


@pytest.mark.parametrize("setting", ["VENV=/tmp/my venv", "VENV=a b/c", "VENV=", "KERNELS=none"])
def test_a_setting_that_is_wrong_is_named(setting):
    done = dry_run("clean", setting)
    assert done.returncode == 2 and f"{setting}: expected" in done.stderr and "warning" not in done.stderr
    assert not done.stdout


def test_a_path_without_spaces_is_taken():
    done = dry_run("clean", "VENV=/tmp/my-venv")
    assert done.returncode == 0 and "rm -rf /tmp/my-venv " in done.stdout and not done.stderr
