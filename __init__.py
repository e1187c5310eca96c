"""Stands in for the package where Python runs in the folder above a clone that is called hf_paged.

There `import hf_paged` finds this folder first. Without this file that would give a module without any name in it.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "hf_paged":
    _package = Path(__file__).resolve().parent / "hf_paged"
    _spec = importlib.util.spec_from_file_location(
        __name__, _package / "__init__.py", submodule_search_locations=[str(_package)]
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
