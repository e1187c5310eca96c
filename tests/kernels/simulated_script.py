"""What the simulated GPU says of a product of matrices as it is compiled, and of one from which something is left out.

    python simulated_script.py          # a JSON object: "" or the fault, and the largest error, of each
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch
import triton.language as tl
from pretended_gpu import pretend
from simulated_gpu import launches
from simulated_gpu.ptx import Fault

from hf_paged.kernels.build.compiling import Kernel


def product(x, y, out, depth):
    """[64, depth] times [depth, 32]."""
    i, j, k = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :], tl.arange(0, 32)
    made = tl.zeros([64, 32], tl.float32)
    for start in range(0, depth, 32):
        made += tl.dot(tl.load(x + i * depth + start + k[None, :]), tl.load(y + j * depth + start + k[:, None]))
    tl.store(out + i * 32 + j, made)


def without(pattern: str, most: int = 10_000) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, "", text, count=most)


DEPTH = 160
EDITS: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: text,
    "barriers": without(r"\bbar\.sync\s+0;"),
    "waits for copies": without(r"cp\.async\.wait_group\s+\d+;"),
    "waits for products": without(r"wgmma\.wait_group\.sync\.aligned\s+\d+;"),
    "fences": without(r"fence\.proxy\.async\S*;"),
    "copies": without(r"cp\.async\.c[ag]\.shared\.global[^;]*;"),
}


def found(edit: str = "nothing", rows: int = 64, shift: int = 0) -> tuple[str, float]:
    """The fault, and the largest error. ``shift``: of y, for which nothing is compiled anew."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(lines, DEPTH, generator=g).bfloat16() for lines in (rows, 33))
    out, own = torch.zeros(64, 32), launches.parse
    launches.parse = lambda text: own(EDITS[edit](text))
    try:
        kernel = Kernel(product)
        compiled = kernel[(1,)](x, y, out, DEPTH, num_stages=3)
        if shift:
            launches.run("product", compiled, {"x": x, "y": y.flatten()[shift:], "out": out, "depth": DEPTH}, (1,))
    except Fault as fault:
        return str(fault), 0.0
    finally:
        launches.parse = own
    return "", (out - x.float() @ y[:32].float().T).abs().max().item()


if __name__ == "__main__":
    pretend()
    launches.simulate()
    print(json.dumps({edit: found(edit) for edit in EDITS} | {"rows": found(rows=63), "alignment": found(shift=1)}))
