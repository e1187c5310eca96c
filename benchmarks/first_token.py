"""Time the first token: imports, load, compiling, capturing, in a process of its own for each case.

    python benchmarks/first_token.py --model 0.6B --out first_token.json
    python benchmarks/first_token.py --model 8B --cases generator-warm enable-warm

`generator-cold` and `generator-warm`: `PagedGenerator.from_pretrained` of a random checkpoint, then one streamed
request of 128 tokens, then nano twice; with an empty and with a filled Triton cache. `enable-cold` and `enable-warm`: a
model of transformers' `from_pretrained`, `hf_paged.enable`, one `generate`. A warm case takes the cache of the cold one
of its kind before it, or fills one. With `--one-by-one` each kernel is compiled at its first launch.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

STARTED = float(os.environ.get("FIRST_TOKEN_STARTED", time.time()))
CASES = ("generator-cold", "generator-warm", "enable-cold", "enable-warm")
PROMPT, NEW = 128, 32
Interval = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B")
    parser.add_argument("--folder", type=Path, help="of the checkpoint, made where it is missing")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--nano", type=int, default=2, help="runs of nano at the end of a generator's case")
    parser.add_argument("--one-by-one", action="store_true", help="compile each kernel at its first launch")
    parser.add_argument("--kernels", action="store_true", help="print what each kernel took to compile")
    parser.add_argument("--cache", type=Path, help="Triton's, for all cases; kept")
    parser.add_argument("--profile", type=Path, help="folder for a profile of each case, up to the first token")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = args.folder or Path("/dev/shm") / f"qwen3-{args.model}"
    if args.worker:
        print(json.dumps(work(args)))
        return
    if not (args.folder / "config.json").exists():
        subprocess.run([sys.executable, Path(__file__).with_name("random_checkpoint.py"), args.model, args.folder],
                       check=True)
    found, caches = {}, Path(tempfile.mkdtemp())
    for case in args.cases:
        kind, _, state = case.partition("-")
        cache = args.cache or caches / kind
        if state == "cold" and cache.exists():
            shutil.rmtree(cache)
        if state == "warm" and not cache.exists():
            run(args, case, cache)
        found[case] = run(args, case, cache)
        report(case, found[case], args.kernels)
    if len({tuple(case["tokens"]) for case in found.values()}) > 1:
        print("the cases made different tokens")
    shutil.rmtree(caches)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


def run(args: argparse.Namespace, case: str, cache: Path) -> dict[str, Any]:
    """One case in a process of its own."""
    command = [sys.executable, __file__, "--worker", case, "--model", args.model, "--folder", str(args.folder),
               "--nano", str(args.nano), *(["--one-by-one"] if args.one_by_one else []),
               *(["--profile", str(args.profile)] if args.profile else [])]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "FIRST_TOKEN_STARTED": str(time.time())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(case: str, found: dict[str, Any], with_kernels: bool) -> None:
    """A line of the case, and its kernels, the slowest first."""
    print(case, *(f"{name} {value:.2f}" for name, value in found["seconds"].items()), flush=True)
    print("    until the first token:", *(f"{name} {value:.2f}" for name, value in found["split"].items()))
    missed = [kernel for kernel in found["kernels"] if not kernel["hit"]]
    print(f"    {len(missed)} kernels compiled, {len(found['kernels']) - len(missed)} found in the cache")
    for kernel in sorted(missed, key=lambda one: -one["seconds"]) if with_kernels else []:
        stages = " ".join(f"{name} {value:.2f}" for name, value in kernel["stages"].items())
        print(f"        {kernel['name']:32s} at {kernel['at']:6.2f} took {kernel['seconds']:5.2f}: {stages}")


class Watch:
    """Intervals in which this process compiled, captured, measured memory or prepared the model."""

    def __init__(self) -> None:
        self.intervals: dict[str, list[Interval]] = {}
        self.kernels: list[dict[str, Any]] = []

    def around(self, owner: Any, name: str, label: str) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.time()
            try:
                return own(*args, **options)
            finally:
                self.intervals.setdefault(label, []).append((start, time.time()))

        setattr(owner, name, timed)

    def compiled(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        end, stages = time.time(), {"ir": times.ir_initialization} | dict(times.lowering_stages)
        seconds = {name: microseconds / 1e6 for name, microseconds in stages.items()}
        took = sum(seconds.values())
        self.intervals.setdefault("compiling", []).append((end - took, end))
        self.kernels.append({"name": metadata["name"], "at": end - took - STARTED, "seconds": took, "stages": seconds,
                             "hit": cache_hit})

    def split(self, start: float, end: float) -> dict[str, float]:
        """Seconds of each label between two times, each instant counted for the first label that holds it."""
        left, found = [(start, end)], {}
        for label in ("compiling", "capturing", "measuring memory", "preparing"):
            found[label] = 0.0
            for a, b in self.intervals.get(label, []):
                rest = []
                for c, d in left:
                    found[label] += max(0.0, min(b, d) - max(a, c))
                    rest += [(x, y) for x, y in ((c, min(d, a)), (max(c, b), d)) if x < y]
                left = rest
        return {**found, "else": sum(b - a for a, b in left)}


def watch() -> Watch:
    """What hf_paged and Triton do from now on."""
    from triton import knobs

    from hf_paged.models.fused import FusedExecutor
    from hf_paged.runner import graphs, memory

    found = Watch()
    knobs.compilation.listener = found.compiled
    found.around(graphs.StepGraphs, "_record", "capturing")
    found.around(memory, "owned_num_blocks", "measuring memory")
    found.around(FusedExecutor, "prepare", "preparing")
    return found


def work(args: argparse.Namespace) -> dict[str, Any]:
    marks = {"start": STARTED}
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    marks["torch and transformers"] = time.time()
    import hf_paged
    from hf_paged import PagedGenerator

    marks["hf_paged"] = time.time()
    if args.one_by_one:
        from hf_paged.kernels.build import compiling

        compiling.active_mode = None
    seen, profile = watch(), cProfile.Profile()
    prompt = [(7 * i) % 10000 for i in range(PROMPT)]
    if args.worker.startswith("generator"):
        generator = PagedGenerator.from_pretrained(args.folder)
        torch.cuda.synchronize()
        marks["load"] = loaded = time.time()
        first = None
        if args.profile:
            profile.enable()
        tokens = []
        for _, output in generator.stream([prompt], GenerationConfig(max_new_tokens=NEW)):
            tokens += output.new_token_ids
            if first is None:
                first = time.time()
                profile.disable()
        marks["first token"], marks["request"] = first or 0.0, time.time()
        from workloads import generation_configs, nano

        workload = nano()
        for i in range(args.nano):
            generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False)
            marks[f"nano {i + 1}"] = time.time()
        generator.close()
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype="auto")
        model.cuda().eval()
        torch.cuda.synchronize()
        marks["load"] = loaded = time.time()
        if args.profile:
            profile.enable()
        hf_paged.enable(model)
        marks["enable"] = time.time()
        ids = torch.tensor([prompt], device="cuda")
        streamer = FirstToken(profile.disable)
        tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamer)[0, PROMPT:].tolist()
        marks["first token"] = streamer.at
        marks["request"] = time.time()
        model.generate(ids, max_new_tokens=NEW, do_sample=False)
        marks["second request"] = time.time()
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(args.profile / f"{args.worker}.pstats")
    names = list(marks)
    seconds = {name: marks[name] - marks[before] for before, name in pairwise(names)}
    seconds["model in memory to first token"] = marks["first token"] - loaded
    split = seen.split(loaded, marks["first token"])
    return {"seconds": seconds, "split": split, "kernels": seen.kernels, "tokens": tokens}


class FirstToken:
    """A streamer that keeps when the first token came, and calls `then`; the prompt comes before it."""

    def __init__(self, then: Callable[[], Any]) -> None:
        self.at, self._puts, self._then = 0.0, 0, then

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.time()
            self._then()

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
