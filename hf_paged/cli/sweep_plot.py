"""Picture of a sweep: what all requests get together against what one of them gets, and the wait for first tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_paged.pictures.figure import new_figure

_BLUE, _GREY = "#1f6fb2", "#9aa5b1"


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the picture, in the format that the file's name says.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(10, 4)
    points = [point for point in report["points"] if point["per_token"]]
    best, wait = figure.subplots(1, 2)
    speeds = [1 / point["per_token"]["p50"] for point in points]
    totals = [point["output_tokens_per_second"] for point in points]
    best.scatter(speeds, totals, color=[_BLUE if point["is_pareto"] else _GREY for point in points], zorder=3)
    line = sorted((speed, total) for speed, total, point in zip(speeds, totals, points, strict=True)
                  if point["is_pareto"])
    best.plot(*zip(*line, strict=True), color=_BLUE, linewidth=1) if line else None
    for speed, total, point in zip(speeds, totals, points, strict=True):
        best.annotate(_rate(point), (speed, total), textcoords="offset points", xytext=(5, 4), fontsize=8)
    best.set(xlabel="tokens a second of one request (median)", ylabel="tokens a second of all", ylim=(0, None),
             title="Throughput against speed; labels: requests a second")
    places = range(len(points))
    for share, color in (("p50", _BLUE), ("p99", _GREY)):
        wait.plot(places, [1000 * point["first"][share] for point in points], "o-", color=color, label=share)
    wait.set_xticks(places, [_rate(point) for point in points])
    wait.set(xlabel="requests a second", ylabel="ms until the first token", ylim=(0, None), title="First token")
    wait.legend(frameon=False)
    for panel in (best, wait):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report['model']}: {report['num_prompts']} requests a run", fontsize=10)
    figure.savefig(path)


def _rate(point: dict[str, Any]) -> str:
    return "all at once" if point["rate"] is None else f"{point['rate']:g}"
