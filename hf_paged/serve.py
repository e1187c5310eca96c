"""`python -m hf_paged.serve ARGS` is `transformers serve ARGS` with hf_paged under every model that it supports.

``--adapter NAME=PATH``, any number of times, loads LoRA adapters beside the model; requests name them as their model.
"""

from __future__ import annotations

import sys

from hf_paged.integration.install import install
from hf_paged.integration.serving.adapters import split_adapters
from hf_paged.integration.serving.server import install_serving
from hf_paged.optional import require


def main(arguments: list[str] | None = None, program: str = "python -m hf_paged") -> None:
    """Install and run transformers' command line; `arguments` (None: the process's) are those of ``serve``."""
    try:
        require("serve", f"{program} serve")  # transformers' own modules fail with a NameError
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from transformers.cli.transformers import app

    adapters, others = split_adapters(sys.argv[1:] if arguments is None else arguments)
    install()
    install_serving(adapters)
    app(["serve", *others], prog_name=program)


if __name__ == "__main__":
    main()
