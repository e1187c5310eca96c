"""Table and plot of what run_all.py measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from published import PEERS

HEADINGS = ("workload", "model", "engine", "tok/s", "runs", "first run", "ready s", "peak GiB", "of floor",
            "of floor, unshared", "published")


def cells(row: dict[str, Any]) -> list[str]:
    key = (row["workload"], row["model"])
    peers = PEERS.get(key, {})
    named = peers if row["engine"] == "ours" else {k: v for k, v in peers.items() if k == row["engine"]}
    published = ", ".join(f"{k} {v:,}" if len(named) > 1 or k != row["engine"] else f"{v:,}" for k, v in named.items())
    start = [row["workload"], row["model"], label(row)]
    if "error" in row:
        return [*start, row["error"], *[""] * 6, published]
    return [
        *start, _number(row["tok_s"]), " ".join(map(_number, row["runs"])), _number(row["first_run"]),
        _decimals(row["ready_s"], 1), _decimals(row["peak_gib"], 1),
        _decimals(row["of_floor"], 2), _decimals(row["of_floor_unshared"], 2), published,
    ]


def label(row: dict[str, Any]) -> str:
    return ", ".join([row["engine"], *(f"{name}={value!r}" for name, value in row["overrides"].items())])


def print_table(report: dict[str, Any]) -> None:
    """With rich where it is installed, else in plain columns."""
    lines = [cells(row) for row in report["rows"]]
    limits = report["ceilings"]
    title = (f"Output tokens per second, {report['machine']}, {report['date']}: copy {limits['copy_tb_s']:.3g} TB/s, "
             f"GEMM {limits['gemm_tflop_s']:.3g} TFLOP/s")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        widths = [max(map(len, column)) for column in zip(HEADINGS, *lines, strict=True)]
        for line in [HEADINGS, *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(*HEADINGS, title=title)
    for line in lines:
        table.add_row(*line)
    console = Console()
    # Into a file or a pipe: as wide as it needs, since a table folded at 80 columns is hard to read.
    (console if console.is_terminal else Console(width=240)).print(table)


def plot(report: dict[str, Any], path: Path) -> bool:
    """Bars of tokens per second by workload, one panel a model; False where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    rows = [row for row in report["rows"] if "error" not in row]
    models = sorted({row["model"] for row in rows}) or [""]
    figure, panels = pyplot.subplots(len(models), 1, figsize=(13, 4.2 * len(models)), squeeze=False)
    for panel, model in zip(panels[:, 0], models, strict=True):
        shown = [row for row in rows if row["model"] == model]
        names = list(dict.fromkeys(row["workload"] for row in shown))
        labels = list(dict.fromkeys(map(label, shown)))
        for i, name in enumerate(labels):
            mine = [row for row in shown if label(row) == name]
            places = [names.index(row["workload"]) + (i + 0.5) / len(labels) * 0.8 - 0.4 for row in mine]
            bars = panel.bar(places, [row["tok_s"] for row in mine], 0.8 / len(labels), label=name)
            panel.bar_label(bars, [_number(row["tok_s"]) for row in mine], fontsize=7, rotation=90, padding=2)
        for j, name in enumerate(names):
            key, least = (name, model), next(row["floor_tok_s"] for row in shown if row["workload"] == name)
            reference = {"vLLM 0.24, published": (PEERS.get(key, {}).get("vllm"), "black"),
                         "floor": (least, "grey")}
            for what, (value, color) in reference.items():
                if value:
                    known = what in panel.get_legend_handles_labels()[1]
                    panel.hlines(value, j - 0.4, j + 0.4, color, "dashed", label=None if known else what)
        panel.set_xticks(range(len(names)), names)
        panel.set_yscale("log")
        panel.set_ylabel("output tokens / s")
        panel.set_title(f"Qwen3-{model}, {report['machine']}, {report['date'][:10]}")
        panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _decimals(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
