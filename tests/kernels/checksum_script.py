"""What is compiled for the checksum before a call and in it, on a GPU that nobody has (`test_weights_checksum.py`)."""

from __future__ import annotations

import json
import threading

import torch
from pretended_gpu import GPU, OnGpu, compile_nothing, compiled, launched, made, pretend

from hf_paged.kernels.weights_checksum import ChecksumPlan, warm_up


def main() -> dict[str, object]:
    warm_up(GPU)
    for thread in threading.enumerate():
        if thread.name.startswith("hf_paged-compile"):
            thread.join()
    early = [(name, thread.rpartition("_")[0]) for name, thread, *_ in (*compiled, *made)]
    with OnGpu():
        ChecksumPlan().launch([torch.zeros(1000), torch.zeros(7, dtype=torch.float16)])
    return {"early": early, "in the call": compiled[1:], "launched": launched}


if __name__ == "__main__":
    pretend()
    compile_nothing()
    print(json.dumps(main()))
