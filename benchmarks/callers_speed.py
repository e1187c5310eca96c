"""Measure calls of a model with code of the caller's own (processors, criteria), alone and beside other calls.

    python benchmarks/callers_speed.py [--model 0.6B] [--runs 3] [--scale 1.0] [--device cuda] [--out f.json]

* own code: `model.generate` of equally long prompts, natively, with a criterion and with a processor of the caller's
  own that cost nothing: at most 1.5 times the native time (0.6B) and 1.15 times (8B), 64 and 128 rows.
* dict: 256 rows with and without `return_dict_in_generate=True`, in turn: within 2 %.
* short call: one row, 64 new tokens, alone and beside a long call of 64 rows with a processor: at most 1.5 times.
* beside: the rate of 64 native rows beside 64 rows with a processor, over the rate of 64 of 128 native rows: at least
  0.85.

Medians of runs in turn, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from workloads import QWEN3_SHAPES, qwen3

import hf_paged


class Idle(LogitsProcessor):
    """A processor of the caller's own that changes nothing; ends the call once `over` is set."""

    def __init__(self, over: threading.Event | None = None) -> None:
        self.over = over

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if self.over is not None and self.over.is_set():
            raise InterruptedError
        return scores


class Never(StoppingCriteria):
    """A criterion of the caller's own that never stops."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def own_processor(over: threading.Event | None = None) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Idle(over)])}


WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "criterion": {"stopping_criteria": StoppingCriteriaList([Never()])},
    "processor": own_processor(),
}


class Calls:
    """Calls of one enabled model."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.device, self.runs = model, args.device, args.runs
        self.new = max(8, int(256 * args.scale))
        self.scale = args.scale

    def inputs(self, rows: int, new: int, width: int = 256) -> dict[str, Any]:
        rows, width = max(1, int(rows * self.scale)), max(4, int(width * self.scale))
        ids = torch.randint(1, 10000, (rows, width), device=self.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False,
                "pad_token_id": 0}

    def seconds(self, **call: Any) -> float:
        self._wait()
        start = time.perf_counter()
        self.model.generate(**call)
        self._wait()
        return time.perf_counter() - start

    def in_turn(self, ways: dict[str, dict[str, Any]]) -> dict[str, float]:
        """Median seconds of each way."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.runs + 1):
            for name, call in ways.items():
                once = self.seconds(**call)
                if turn:
                    times[name].append(once)
        return {name: statistics.median(values) for name, values in times.items()}

    def own_code(self) -> dict[str, float]:
        found = {}
        for rows in (64, 128):
            inputs = self.inputs(rows, self.new)
            medians = self.in_turn({name: inputs | extra for name, extra in WAYS.items()})
            for name in ("criterion", "processor"):
                found[f"{rows} rows, {name}: times native"] = medians[name] / medians["native"]
            found[f"{rows} rows, native: ms a step"] = medians["native"] / self.new * 1e3
        return found

    def dict_result(self) -> dict[str, float]:
        inputs = self.inputs(256, self.new)
        medians = self.in_turn({"plain": inputs, "dict": inputs | {"return_dict_in_generate": True}})
        return {"256 rows, return_dict_in_generate: times native": medians["dict"] / medians["plain"]}

    def short_call(self) -> dict[str, float]:
        short, long = self.inputs(1, max(4, self.new // 4), 64), self.inputs(64, 4 * self.new)
        alone = self.in_turn({"alone": short})["alone"]
        with self._beside(long):
            beside = self.in_turn({"beside": short})["beside"]
        return {"a short call beside a long one: times alone": beside / alone, "a short call alone: s": alone}

    def rows_beside(self) -> dict[str, float]:
        together = self.in_turn({"128": self.inputs(128, self.new)})["128"]
        with self._beside(self.inputs(64, 4 * self.new)):
            beside = self.in_turn({"64": self.inputs(64, self.new)})["64"]
        return {"64 native rows beside 64 others: rate over that of 64 of 128": together / beside}

    def _beside(self, call: dict[str, Any]) -> Beside:
        return Beside(self.model, call)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class Beside:
    """A thread that makes a call with a processor of its own over and over."""

    def __init__(self, model: Any, call: dict[str, Any]) -> None:
        self._over, self.tokens = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, args=(model, call))

    def _run(self, model: Any, call: dict[str, Any]) -> None:
        while not self._over.is_set():
            try:
                model.generate(**call, **own_processor(self._over))
            except InterruptedError:
                return

    def __enter__(self) -> Beside:
        self._thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["own_code", "dict_result", "short_call", "rows_beside"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = qwen3(args.model, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
    calls = Calls(hf_paged.enable(model, strict=True), args)
    found: dict[str, float] = {}
    for part in args.parts:
        figures: Callable[[], dict[str, float]] = getattr(calls, part)
        found |= figures()
    for name, value in found.items():
        print(f"{args.model} {name}: {value:.3f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
