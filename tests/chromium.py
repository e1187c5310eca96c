"""Headless Chromium, where it is installed (Debian's package `chromium`): what a page looks like to a person."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
          "--disable-background-networking", "--disable-component-update", "--disable-sync")


def _run(page: Path, folder: Path, *flags: str) -> str:
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("Chromium is not installed")
    done = subprocess.run([binary, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(page: Path, folder: Path) -> str:
    """The page as Chromium understood it, as HTML."""
    return _run(page, folder, "--dump-dom")


def screenshot(page: Path, folder: Path, width: int, height: int) -> Path:
    """A PNG of it."""
    path = folder / "screenshot.png"
    _run(page, folder, f"--screenshot={path}", f"--window-size={width},{height}")
    return path
