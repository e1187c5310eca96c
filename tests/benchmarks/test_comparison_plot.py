"""The picture of the README shows the figures of docs/performance.md's visit."""

from __future__ import annotations

import re

import comparison_plot
import pytest
import report

REPORTS = report.load()
RATES = [f"{rate:,.0f}" for of_model in comparison_plot.bars(REPORTS).values() for rates in of_model.values()
         for rate in rates.values()]


def test_every_figure_stands_in_the_page():
    page = report.PAGE.read_text()
    assert RATES and [rate for rate in RATES if not re.search(rf"(?<![\d,]){rate}(?!,?\d)", page)] == []


def test_the_committed_picture_has_every_figure():
    picture = report.PICTURE.read_text()
    assert [text for text in RATES if f">{text}<" not in picture] == []


def test_rows_without_vllm_a_switch_off_or_autocast_have_no_bar():
    row = {"model": "8B", "workload": "nano", "engine": "ours", "overrides": {}, "tok_s": 2.0}
    others = [row | {"engine": "vllm", "tok_s": 1.0}, row | {"overrides": {"overlap": False}, "tok_s": 9.0},
              row | {"engine": "vllm-autocast"}, row | {"workload": "single"}]
    expected = {"8B": {"nano": {"ours": 2.0, "vllm": 1.0}}}
    assert comparison_plot.bars([{"rows": [row, *others]}, {"columns": []}]) == expected
    assert comparison_plot.bars([{"rows": [row]}]) == {}


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert comparison_plot.plot(REPORTS, tmp_path / "made.svg")
    made = (tmp_path / "made.svg").read_text()
    assert all(text in made for text in ("hf_paged", "vLLM", REPORTS[0]["machine"]))
    assert not comparison_plot.plot([REPORTS[0] | {"rows": []}], tmp_path / "none.svg")
