"""Figures of matplotlib, an optional package: its global state is not touched, and no window is opened."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from hf_paged.optional import require


def new_figure(width: float, height: float) -> Any:
    """Make an empty `matplotlib.figure.Figure`, sized in inches, laid out when drawn; a notebook shows it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return _figure_class()(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> Any:
    require("plot", "a picture")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """Figure that notebooks show also where pyplot is not imported."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=80)
            return written.getvalue()

    return Picture
