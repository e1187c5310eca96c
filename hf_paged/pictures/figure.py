"""Figures of matplotlib, which is an extra: none of its global state is touched, and no window is opened."""

from __future__ import annotations

import io
from functools import cache
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of so many inches, laid out when it is drawn. A notebook shows it.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        figure = _figure_class()
    except ImportError as error:
        raise RuntimeError('a picture needs matplotlib: pip install "hf-paged[plot]"') from error
    return figure(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> Any:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """Shows itself in notebooks, also where nobody has imported pyplot."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=80)
            return written.getvalue()

    return Picture
