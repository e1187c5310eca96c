"""`python -m hf_paged.serve ARGS` is `transformers serve ARGS` with hf_paged under every model that it supports.

``--adapter NAME=PATH``, any number of times, loads LoRA adapters beside the model; requests name them as their model.
``--engine FIELD=VALUE``, any number of times, sets a field of `PagedConfig`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

from hf_paged.config import PagedConfig
from hf_paged.integration.install import install
from hf_paged.integration.serving.adapters import split_adapters
from hf_paged.integration.serving.server import install_serving
from hf_paged.optional import require

SETTING = "--engine"


def split_settings(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of `PagedConfig` that a command line sets, checked, and the arguments that are left."""
    parser = argparse.ArgumentParser("python -m hf_paged.serve", add_help=False, allow_abbrev=False)
    parser.add_argument(SETTING, action="append", default=[], metavar="FIELD=VALUE")
    given, others = parser.parse_known_args(arguments)
    known, settings = {field.name for field in fields(PagedConfig)}, {}
    for text in given.engine:
        name, _, value = text.partition("=")
        if name not in known or not value:
            parser.error(f"{SETTING} {text!r}: expected FIELD=VALUE with a field of PagedConfig: "
                         f"{', '.join(sorted(known))}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
        try:
            PagedConfig(**settings)
        except (ValueError, TypeError) as error:
            parser.error(f"{SETTING} {text!r}: {error}")
    return settings, others


def main(arguments: list[str] | None = None, program: str = "python -m hf_paged") -> None:
    """Install and run transformers' command line; `arguments` (None: the process's) are those of ``serve``."""
    try:
        require("serve", f"{program} serve")  # transformers' own modules fail with a NameError
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from transformers.cli.transformers import app

    adapters, others = split_adapters(sys.argv[1:] if arguments is None else arguments)
    settings, others = split_settings(others)
    install(**settings)
    install_serving(adapters)
    app(["serve", *others], prog_name=program)


if __name__ == "__main__":
    main()
