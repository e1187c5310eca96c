"""Command `hf-paged`. Its parser starts fast: only a running command imports torch and transformers."""

from __future__ import annotations

import argparse
import sys

import hf_paged
from hf_paged.cli import bench, check, serve


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status.

    Args:
        arguments: arguments of the command; None: the process's arguments.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["serve"]:  # transformers parses the arguments of serve
        return serve.run(given[1:])
    parser = argparse.ArgumentParser("hf-paged", description="Serving-engine speed for Hugging Face models.")
    parser.add_argument("--version", action="version", version=f"hf_paged {hf_paged.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check.add_parser(commands)
    bench.add_parser(commands)
    commands.add_parser("serve", add_help=False, help="an OpenAI server: transformers' own, with hf_paged under it")
    parsed = parser.parse_args(given)
    try:
        status: int = parsed.run(parsed)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"hf-paged: {error}", file=sys.stderr)
        return 2
    return status
