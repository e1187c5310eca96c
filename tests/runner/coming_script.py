"""What a runner's steps launch on a GPU that nobody has; run by `test_coming.py`, which looks at what it prints."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from pretended_gpu import OnGpu, compile_nothing, compiled, launched, pretend
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_paged.kernels.build import compiling
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.models import find_executor
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import PaddedSteps

ROWS, TOKENS = 80, 64  # up to where decode attention takes three configurations
all_seen = threading.Event()  # kernels take as long to compile as it takes to look at all that comes


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("hf_paged-compile"):
            thread.join()


def coming(steps: PaddedSteps) -> Iterator[Callable[[], object]]:
    yield from dry_runs(steps, ROWS, TOKENS)
    all_seen.set()


def main(backend: str) -> dict[str, object]:
    # Two layers see all positions and two a window, by kernels of their own; with the kernel for Hopper all see all.
    windows = backend == "triton"
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=256, use_sliding_window=windows,
        sliding_window=32, max_window_layers=2,
    )).to(torch.bfloat16).eval()
    # Nobody runs the kernels: what they would have written has to be valid.
    with OnGpu(), torch.inference_mode(), compiling._Zeros():
        executor = find_executor(model)(model, merge_weights=False)  # type: ignore[misc]
        runner = ModelRunner(executor, executor.kv_spec(), block_size=16, num_blocks=20, max_num_seqs=ROWS,
                             max_model_len=256, max_num_batched_tokens=TOKENS, attention_backend=backend)
        runner.prepare()
        steps = PaddedSteps(executor, runner.cache, runner.state, runner.attention, TOKENS)
        first = partial(steps.run_padding_tokens, 16)
        compiled_together(first, coming(steps))
        finish()
        behind = [name for name, *_ in compiled]
        threads = sorted({thread.rpartition("_")[0] for _, thread, _ in compiled})
        together = list(launched)
        del launched[:], compiled[:]
        first()
        alone = list(launched)
        del compiled[:]
        sizes = []
        for run in dry_runs(steps, ROWS, TOKENS):
            run()
            sizes.append([run.func.__name__, *run.args])
        return {"behind": behind, "threads": threads, "together": together, "alone": alone, "missed": compiled,
                "sizes": [[name, int(size)] for name, size in sizes]}


if __name__ == "__main__":
    pretend()
    compile_nothing(after=all_seen)
    compiling._PATIENCE_S = 0.0
    print(json.dumps(main(sys.argv[1])))
