"""The benchmark of steps of few rows runs; its figures are a GPU's to give."""

import argparse
import sys

import pytest
from few_rows_speed import case_of, main


def test_a_line_for_each_case(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["few_rows_speed.py", "--model", "tiny", "--cases", "1x20", "2x20", "--new", "4",
                                      "--device", "cpu"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["tiny, 1 x 20", "tiny, 2 x 20"]
    assert all("by one launch: False" in line and "layer by layer" in line for line in lines)


@pytest.mark.parametrize("text", ["384", "0x384", "16x384", "2x", "x", "2x-3", "axb"])
def test_a_case_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected ROWSxLENGTH"):
        case_of(text)
