"""`hf-paged serve ARGS`, which runs `python -m hf_paged.serve ARGS`."""

from __future__ import annotations


def run(arguments: list[str]) -> int:
    """Serve until the process gets a signal to stop."""
    from hf_paged.serve import main

    main(arguments, program="hf-paged")
    return 0
