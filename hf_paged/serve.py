"""`python -m hf_paged.serve ARGS` runs `transformers serve ARGS` with hf_paged under every model that it supports.

``--adapter NAME=PATH``, any number of times, loads LoRA adapters; requests give an adapter's name as their model.
``--engine FIELD=VALUE``, any number of times, sets a field of `PagedConfig`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hf_paged.config import PagedConfig, read_pairs
from hf_paged.integration.install import install
from hf_paged.optional import require
from hf_paged.server.adapters import OPTION as ADAPTER
from hf_paged.server.adapters import split_adapters
from hf_paged.server.server import install_serving

SETTING = "--engine"
_HELP = f"""Options of hf_paged, any number of times each:
  {ADAPTER} NAME=PATH      Load a LoRA adapter beside the model; requests name it as their model.
  {SETTING} FIELD=VALUE     Set a field of PagedConfig (docs/options.md), as max_model_len=8192.

Options of transformers serve:
"""


def split_settings(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of `PagedConfig` that a command line sets, checked, and the other arguments."""
    parser = argparse.ArgumentParser("python -m hf_paged.serve", add_help=False, allow_abbrev=False)
    parser.add_argument(SETTING, action="append", default=[], metavar="FIELD=VALUE")
    given, others = parser.parse_known_args(arguments)
    try:
        settings = read_pairs(given.engine)
        PagedConfig(**settings)  # in one call, since fields are checked against each other
    except (ValueError, TypeError) as error:
        parser.error(f"{SETTING}: {error}")
    return settings, others


def main(arguments: list[str] | None = None, program: str = "python -m hf_paged") -> None:
    """Install hf_paged and run ``transformers serve`` with `arguments` (None: the process's arguments)."""
    try:
        require("serve", f"{program} serve")  # else transformers fails with a NameError
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from transformers.cli.transformers import app

    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments:
        print(_HELP)
    adapters, others = split_adapters(arguments)
    settings, others = split_settings(others)
    install(**settings)
    install_serving(adapters)
    app(["serve", *others], prog_name=program)


if __name__ == "__main__":
    main()
