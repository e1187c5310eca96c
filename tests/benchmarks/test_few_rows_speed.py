"""The benchmark of steps of few rows runs; its figures are a GPU's to give."""

import argparse
import sys

import pytest
from few_rows_speed import case_of, main


def test_a_line_for_each_case(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["few_rows_speed.py", "--model", "tiny", "--cases", "1x20", "2x20+30",
                                      "--new", "4", "--device", "cpu"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["tiny, 1x20", "tiny, 2x20+30"]
    assert all("by one launch: False" in line and "layer by layer" in line for line in lines)


def test_the_last_row_may_follow_more():
    assert case_of("1x384") == (384,) and case_of("4x20+40") == (20, 20, 20, 40)


@pytest.mark.parametrize("text", ["384", "0x384", "16x384", "2x", "x", "2x-3", "axb", "2x20+", "2x20+0", "3x20",
                                  "1x20+40"])
def test_a_case_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected ROWSxLENGTH"):
        case_of(text)
