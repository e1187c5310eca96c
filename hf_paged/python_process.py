"""Arguments for starting another Python process that imports modules from exactly the paths of this process."""

from __future__ import annotations

import os
import sys
from typing import Any


def module_process(module: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` that run ``python -m module``.

    Raises:
        OSError: this program embeds Python: `sys.executable` would start the program itself.
    """
    if getattr(sys, "frozen", False) or "python" not in os.path.basename(sys.executable or ""):
        raise OSError(f"sys.executable={sys.executable!r}: expected a Python")
    # Relative entries of sys.path (a notebook's "") mean the current directory, and "-m" must not put it in front.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    # A session of its own: otherwise Ctrl-C in the terminal would end the child before this process handles it.
    return {"args": [sys.executable, *safe_path, "-m", module], "env": {**environment, "PYTHONPATH": path},
            "start_new_session": True}
