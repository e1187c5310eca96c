"""Command line of a tool that makes a page of the docs from the code."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def write_or_check(path: Path, render: Callable[[], str], description: str | None) -> int:
    """Write what `render` makes to `path`; with ``--check`` only compare. The exit status: 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if the file is out of date")
    if parser.parse_args().check:
        return int(path.read_text() != render())
    path.write_text(render())
    return 0
