"""Time what a generate call costs the host, before its first step and in every decode step, on a CPU.

    python benchmarks/host_cost.py [--layers 28] [--requests 256]

Before: `PagedGenerator.generate` with prompts of 100 to 1,024 tokens and a generation config each, up to the first
step. Add: `Engine.add_request` with prompts of 300 tokens, for requests that come alone (a step between any two) or
100 before one step, which share one look at the model. Arrival: a step that takes in a prompt of 40 tokens beside 8
running requests. Step: schedule, commit and what lies around them with every request running; no forward, random
tokens; in the end with metrics (needs prometheus_client). Times are the thread's CPU time, since machines are shared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3ForCausalLM
from workloads import qwen3_config

from hf_paged import PagedGenerator
from hf_paged.engine.loop import EngineCore
from hf_paged.integration.requests import Call, runnable
from hf_paged.runner.model_runner import ModelRunner, StepHandle


class _FirstStep(Exception):
    pass


def before_the_first_step(generator: PagedGenerator, prompts: list, configs: list, repeats: int = 15) -> list[float]:
    """Milliseconds of each repeat."""
    own, reached = EngineCore.step, []

    def step(self: EngineCore, **options: Any) -> None:
        reached.append(time.thread_time())
        raise _FirstStep

    EngineCore.step, times = step, []  # type: ignore[method-assign]
    try:
        for _ in range(repeats):
            start = time.thread_time()
            try:
                generator.generate(prompts, configs, use_tqdm=False)
            except _FirstStep:
                times.append((reached.pop() - start) * 1e3)
    finally:
        EngineCore.step = own  # type: ignore[method-assign]
    return times


def of_add_request(generator: PagedGenerator, together: int, repeats: int = 30) -> list[float]:
    """Milliseconds a request of each repeat, in which `together` requests come before one step."""
    engine, config, times = generator.engine, GenerationConfig(max_new_tokens=2), []
    prompt = [i % 10000 for i in range(300)]
    for _ in range(repeats):
        start = time.thread_time()
        ids = [engine.add_request(prompt, config) for _ in range(together)]
        times.append((time.thread_time() - start) * 1e3 / together)
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
    return times


def of_an_arrival(generator: PagedGenerator, repeats: int = 100) -> list[float]:
    """Milliseconds of each step that takes in a request of `add_request`."""
    engine, times, own = generator.engine, [], ModelRunner.launch
    ModelRunner.launch = _launch  # type: ignore[method-assign]
    try:
        for i in range(8):
            engine.add_request([i] * 40, GenerationConfig(max_new_tokens=4 * repeats))
        for i in range(repeats):
            engine.step()
            request_id = engine.add_request([i, *range(39)], GenerationConfig(max_new_tokens=2))
            start = time.thread_time()
            engine.step()
            times.append((time.thread_time() - start) * 1e3)
            engine.abort(request_id)
        for request_id in list(engine._core.requests):
            engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
    finally:
        ModelRunner.launch = own  # type: ignore[method-assign]
    return times[repeats // 2 :]


def _launch(self: ModelRunner, plan: Any, parameters: list, *_: Any) -> StepHandle:
    """No forward, random tokens."""
    return StepHandle(torch.from_numpy(np.random.default_rng(0).integers(0, 10000, len(plan.slots))), None)


def in_a_step(generator: PagedGenerator, prompts: list, stream: bool, steps: int = 300) -> list[float]:
    """Microseconds of each decode step."""
    own, times = ModelRunner.launch, []
    ModelRunner.launch = _launch  # type: ignore[method-assign]
    try:
        with generator.engine.session(stream=stream) as session:
            config = GenerationConfig(max_new_tokens=2 * steps)
            generator.engine.add_all(session, runnable(generator._reader.read(Call.of(prompts, config, seed=0))))
            while len(times) < steps:
                start = time.thread_time()
                generator.engine.advance([session])[0]
                times.append((time.thread_time() - start) * 1e6)
    finally:
        ModelRunner.launch = own  # type: ignore[method-assign]
    return times[-steps // 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    config = qwen3_config("tiny")
    config.num_hidden_layers, config.layer_types = args.layers, ["full_attention"] * args.layers
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    r = random.Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(args.requests)]
    configs = [GenerationConfig(max_new_tokens=r.randint(100, 1024), do_sample=True, temperature=0.6, top_k=0)
               for _ in prompts]
    blocks = args.requests * 110
    with PagedGenerator(model, num_blocks=blocks, max_num_seqs=args.requests, max_model_len=2048, overlap=True) as own:
        own.generate([prompts[0][:16]], max_new_tokens=2, use_tqdm=False)
        times = before_the_first_step(own, prompts, configs)
        print(f"{args.requests} requests, {args.layers} layers, torch {torch.__version__}")
        print(f"before the first step: {statistics.median(times):.1f} ms (fastest {min(times):.1f})")
        for together in (1, 100):
            times = of_add_request(own, together)
            print(f"add_request, {together} before a step: {statistics.median(times):.2f} ms a request (fastest "
                  f"{min(times):.2f})")
        times = of_an_arrival(own)
        print(f"a step with an arrival: {statistics.median(times):.2f} ms (fastest {min(times):.2f})")
        for stream in (False, True):
            times = in_a_step(own, prompts, stream)
            print(f"{'streaming' if stream else 'not streaming'}: {statistics.median(times):.0f} us a decode step "
                  f"(fastest {min(times):.0f})")
        own.metrics()
        times = in_a_step(own, prompts, stream=False)
        print(f"not streaming, with metrics: {statistics.median(times):.0f} us a decode step (fastest "
              f"{min(times):.0f})")


if __name__ == "__main__":
    main()
