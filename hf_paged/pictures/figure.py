"""Figures of matplotlib, which is an extra: none of its global state is touched, and no window is opened."""

from __future__ import annotations

from typing import Any


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of so many inches, laid out when it is drawn.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError('a picture needs matplotlib: pip install "hf-paged[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")
