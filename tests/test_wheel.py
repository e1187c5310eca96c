"""The wheel, installed into an empty environment from its file alone, passes the demo and has its command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
# Pinned, as in the Makefile: `make test-wheel` names all that are supported.
TORCHES = os.environ.get("WHEEL_TORCHES", "2.13.0").split()
# Without a GPU torch's own index has builds without CUDA, of which PyPI's bring gigabytes.
INDEX = () if torch.cuda.is_available() else ("--retries", "1", "--extra-index-url",
                                              "https://download.pytorch.org/whl/cpu")


def run(*command, cwd):
    """Without anything of this environment's; what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=kept, timeout=1200)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package, built from what git knows of."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    source = tmp_path / "source"  # a build leaves folders behind
    files = subprocess.run(["git", "ls-files", "hf_paged", "pyproject.toml", "README.md", "LICENSE"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", source, "--no-deps", "-w", tmp_path, cwd=tmp_path)
    [wheel] = tmp_path.glob("hf_paged-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hf_paged/")}
    assert packed == {name for name in files if name.startswith("hf_paged/")}
    return wheel


@pytest.mark.parametrize("version", TORCHES)
def test_the_wheel_alone_runs_the_demo(wheel, version, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python, command = tmp_path / "empty/bin/python", tmp_path / "empty/bin/hf-paged"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", *INDEX, f"torch=={version}", f"{wheel}[demo]",
        cwd=tmp_path)
    assert run(python, "-c", "import torch; print(torch.__version__)", cwd=tmp_path).startswith(version)
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples)
    said = run(python, examples / "quickstart.py", cwd=examples)
    assert "same tokens as stock generate: True" in said and "4821" in said
    home = run(python, "-c", "import hf_paged; print(hf_paged.__file__)", cwd=tmp_path)
    assert home.startswith(str(tmp_path / "empty"))

    taken = []
    for _ in range(3):
        started = time.perf_counter()
        assert "check" in run(command, "--help", cwd=tmp_path)
        taken.append(time.perf_counter() - started)
    assert min(taken) < 1.0
    report = run(command, "check", examples / "models/tiny-qwen3", "--device", "cpu", cwd=tmp_path)
    assert "greedy search  native" in report
