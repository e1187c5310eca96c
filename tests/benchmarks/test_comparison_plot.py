"""The picture of the README shows figures that stand in docs/performance.md."""

from __future__ import annotations

import json
import re

import comparison_plot
import pytest

REPORT = json.loads(comparison_plot.FIGURES.read_text())


def test_every_figure_stands_in_the_page():
    page = (comparison_plot.FIGURES.parents[1] / "performance.md").read_text()
    for row in REPORT["rows"]:
        for number in filter(None, row["tok_s"]):
            assert re.search(rf"(?<![\d,]){number:,}(?!,?\d)", page), row


def test_the_committed_picture_has_every_figure():
    picture = comparison_plot.FIGURES.with_suffix(".svg").read_text()
    shown = [f"{number:,}" for row in REPORT["rows"] for number in filter(None, row["tok_s"])]
    assert [text for text in shown if f">{text}<" not in picture] == []


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    comparison_plot.plot(REPORT, tmp_path / "made.svg")
    made = (tmp_path / "made.svg").read_text()
    assert all(engine in made for engine in REPORT["engines"]) and REPORT["note"] in made
