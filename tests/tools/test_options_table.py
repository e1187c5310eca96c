"""docs/options.md is what the deciding tables say."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "tools" / "options_table.py"


def test_the_committed_table_is_what_the_code_decides():
    spec = importlib.util.spec_from_file_location("options_table", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PATH.read_text() == module.render(), "run: python tools/options_table.py"
