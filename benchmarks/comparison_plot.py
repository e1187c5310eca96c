"""Draw bars of tokens per second by workload and engine, relative to vLLM: the picture of the README.

`report.py` draws it from the visit that docs/performance.md shows; `run_all.py --plot-from` draws any run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import report

BASE = "vllm"
COLORS = ("#1f6fb2", "#9aa5b1", "#d8b365", "#7fae7f")


def bars(reports: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By model and workload the rate of each engine, where vLLM has one, too."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in (row for one in reports if "columns" not in one for row in one["rows"]):
        if not row["overrides"] and "tok_s" in row and not row["engine"].endswith(report.AUTOCAST):
            found.setdefault(row["model"], {}).setdefault(row["workload"], {})[row["engine"]] = row["tok_s"]
    compared = {model: {name: rates for name, rates in of_model.items() if BASE in rates and "ours" in rates}
                for model, of_model in found.items()}
    return {model: of_model for model, of_model in compared.items() if of_model}


def plot(reports: list[dict[str, Any]], path: Path) -> bool:
    """One panel a model; False where matplotlib is missing or no row is of vLLM."""
    panels = bars(reports)
    try:
        import matplotlib
    except ImportError:
        return False
    if not panels:
        return False
    matplotlib.use("Agg")
    # Text stays text, and equal figures make an equal file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hf_paged", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 3.6), squeeze=False,
                                   width_ratios=[len(workloads) for workloads in panels.values()])
    for axis, (model, workloads) in zip(axes[0], panels.items(), strict=True):
        engines = list(dict.fromkeys(["ours", BASE, *(name for rates in workloads.values() for name in rates)]))
        for i, (engine, color) in enumerate(zip(engines, COLORS, strict=False)):
            known = [(place + (i - (len(engines) - 1) / 2) * 0.3, rates[engine], rates[BASE])
                     for place, rates in enumerate(workloads.values()) if engine in rates]
            drawn = axis.bar([x for x, _, _ in known], [rate / base for _, rate, base in known], 0.29,
                             label=report.named(engine), color=color)
            axis.bar_label(drawn, [f"{rate:,.0f}" for _, rate, _ in known], fontsize=7, padding=1)
        axis.set_xticks(range(len(workloads)), map(report.shown, workloads))
        axis.set_title(f"Qwen3-{model}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"times {report.named(BASE)}")
    axes[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(f"Output tokens per second, {reports[0]['machine']}, Qwen3 shapes in bf16, "
                    f"{reports[0]['date'][:10]}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True
