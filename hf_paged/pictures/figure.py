"""Figures of matplotlib, which is an extra: none of its global state is touched, and no window is opened."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from hf_paged.optional import require


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of so many inches, laid out when it is drawn. A notebook shows it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return _figure_class()(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> Any:
    require("plot", "a picture")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """Shows itself in notebooks, also where nobody has imported pyplot."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=80)
            return written.getvalue()

    return Picture
