"""Write docs/models.md from the fused families and the accepted verdicts on classes of transformers.

    python tools/models_page.py [--check]
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generated_page import write_or_check
from model_verdicts import accepted, accepted_version

from hf_paged.guards.families import FAMILIES

PATH = Path(__file__).resolve().parents[1] / "docs" / "models.md"
HEAD = """# Models

This page says how each causal LM class of transformers {version} runs: {native} of {all} natively. It is made by
`python tools/models_page.py` from the fused families and from `python tools/model_verdicts.py`, which proves each
class with its default config, small and in float64. [design/models.md](design/models.md) has the idea.

| runs | what that is |
|---|---|
| fused | by hf_paged's kernels |
| proof | by its own modules around paged attention, once `enable` has proved the config, up to the tokens named here |
| open | in stock: all numbers were stock's, but code that the proof did not reach may change them |
| stock | in stock, for the reason named here; another config may be proved |

`hf-paged check MODEL` says how a checkpoint runs. Of {texts} further image-text classes (second list) calls with text
alone run natively; calls with images do where the class [hands its decoder what is known](design/images.md). Classes
with a [recurrent state](design/recurrent_states.md) run natively on one CPU or GPU, with images, too. Where
`flash-linear-attention` is installed, transformers calls it for delta nets in the proof on the CPU, too, where it does
not run: they go to stock.

"""
TABLE = """| class | runs | limit or reason |
|---|---|---|
"""
IMAGE_TEXT = "\n## Image-text classes, with text alone\n\n"


def kind_of(name: str, verdict: Mapping[str, Any]) -> str:
    """Return how a class runs, as the page's first table has it."""
    if any(family.model_name == name for family in FAMILIES):
        return "fused"
    return {"proved": "proof", "open": "open", "refused": "stock"}[verdict["outcome"]]


def short(reason: str) -> str:
    """Return the beginning of a reason, without places in the model and what an error said."""
    reason = re.sub(r"^(?:\w+\.)+(?:self_attn|attention|attn) ", "attention ", " ".join(reason.split()))
    return re.split(r" \(|, which|; |: kernels|, and caches", reason)[0][:90].strip()


def note_of(kind: str, verdict: Mapping[str, Any]) -> str:
    if kind in ("open", "stock"):
        return short(verdict["reason"])
    return f"to {verdict['max_length']:,} tokens" if kind == "proof" and verdict["max_length"] else ""


def render() -> str:
    verdicts = accepted()
    kinds = {name: kind_of(name, verdict) for name, verdict in verdicts.items()}
    counts = Counter(kinds.values())
    texts = {name: verdict for name, verdict in accepted("image_text").items()
             if kind_of(name, verdict) == "proof"}
    head = HEAD.format(version=accepted_version(), native=counts["fused"] + counts["proof"],
                       all=len(kinds), texts=len(texts))
    return head + _table(verdicts) + IMAGE_TEXT + _table(texts)


def _table(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = {name: kind_of(name, verdict) for name, verdict in verdicts.items()}
    return TABLE + "".join(f"|`{name}`|{kind}|{note_of(kind, verdicts[name])}|\n" for name, kind in kinds.items())


def main() -> int:
    return write_or_check(PATH, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
