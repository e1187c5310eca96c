"""Bars of tokens per second by workload and engine, relative to one of them: the picture of the README.

    python benchmarks/comparison_plot.py [docs/figures/throughput.json]     # writes throughput.svg beside it

`run_all.py --plot-from` draws a run; this draws what stands in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "throughput.json"
COLORS = ("#1f6fb2", "#9aa5b1", "#d8b365")


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel a model; an engine without a figure has no bar there."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and equal figures make an equal file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hf_paged", "font.size": 9})
    from matplotlib import pyplot

    base = report["engines"].index(report["relative_to"])
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    widths = [sum(row["model"] == model for row in report["rows"]) for model in models]
    figure, panels = pyplot.subplots(1, len(models), figsize=(11, 3.6), squeeze=False, width_ratios=widths)
    for panel, model in zip(panels[0], models, strict=True):
        rows = [row for row in report["rows"] if row["model"] == model]
        for i, (engine, color) in enumerate(zip(report["engines"], COLORS, strict=True)):
            known = [(place + i * 0.3 - 0.3, row["tok_s"]) for place, row in enumerate(rows) if row["tok_s"][i]]
            heights = [figures[i] / figures[base] for _, figures in known]
            bars = panel.bar([x for x, _ in known], heights, 0.29, label=engine, color=color)
            panel.bar_label(bars, [f"{figures[i]:,}" for _, figures in known], fontsize=6.5, padding=1)
        panel.set_xticks(range(len(rows)), [row["workload"] for row in rows])
        panel.set_ylim(0, 2.3)
        panel.set_title(f"Qwen3-{model}", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel(f"times {report['relative_to']}")
    panels[0][0].legend(frameon=False, fontsize=8, loc="upper left", ncols=len(report["engines"]))
    figure.suptitle(f"{report['title']}\n{report['note']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="?", type=Path, default=FIGURES)
    figures = parser.parse_args().figures
    plot(json.loads(figures.read_text()), figures.with_suffix(".svg"))


if __name__ == "__main__":
    main()
