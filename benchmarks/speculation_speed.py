"""Measure what guesses at tokens that stood before bring, and what they cost where nothing repeats.

    python benchmarks/speculation_speed.py [--models 0.6B 8B] [--batches 1 8 32] [--tokens 256] [--runs 3]

Random weights do not repeat their prompts, so guesses come from earlier rollouts of the same prompts, which is a
feature of its own. "recorded" has the greedy continuation itself, as an edit that changes nothing; in "1 wrong of n"
one token of n of the recorded text is another one, as in a text that is edited there. "unknown" has no rollouts, and
its text never repeats; nor does "sampled", which draws at temperature 1. Each is compared with the same call without
guesses, run in turn. "tiny" is four small layers, for a CPU.

Among the logits of random weights the first two are often as good as equal, so that rounding decides, and a step of
other rows makes another text. Here layers add little to the embedding, and the head's rows are the embedding's in
another order: which token follows is certain, and every product is computed as ever.

Aims: "recorded" and "1 wrong of 20" at batch 1 at least 2, at batch 8 1.5; "sampled" 0.98.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from workloads import qwen3

from hf_paged import PagedGenerator
from hf_paged.engine.features.drafts import Speculation
from hf_paged.engine.observer import Committed, Launched

DRAFTS = 7
WRONG = {"recorded": 0, "1 wrong of 20": 20, "1 wrong of 8": 8, "1 wrong of 3": 3}

TEXTS = [*WRONG, "unknown", "sampled"]


def model_of(name: str, device: str) -> Any:
    if name != "tiny":
        model = qwen3(name, torch.bfloat16, device)
    else:
        config = Qwen3Config(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=32,
                             num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096)
        model = Qwen3ForCausalLM(config).eval().to(device)
    embedding = model.get_input_embeddings().weight
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0)).to(embedding.device)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(embedding[order].clone())
    return model


class Clock:
    """Times of steps with guesses: until the plan, until the launch is over, until the wait is over, and in all."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, ...]] = []
        self.step: Launched | None = None
        self.before = 0.0

    def launched(self, step: Launched) -> None:
        self.step = step

    def committed(self, step: Committed) -> None:
        launched = self.step
        if launched is not None and launched.plan is step.plan and step.plan.drafts is not None:
            self.parts.append((launched.scheduled - launched.began, launched.launched - launched.scheduled,
                               step.ready - launched.launched, step.ready - self.before))
        self.before = step.ready

    def means(self) -> str:
        if not self.parts:
            return "none"
        names = "plan", "launch", "wait", "all"
        return ", ".join(f"{name} {1e3 * statistics.median(part):.2f}"
                         for name, part in zip(names, zip(*self.parts, strict=True), strict=True))


def remember(generator: PagedGenerator, prompts: list[list[int]], outputs: list[list[int]], one_of: int) -> None:
    """Let these outputs be all that the engine knows of earlier rollouts, with one token of `one_of` replaced."""
    drawn, rollouts = random.Random(2), generator.engine._core.features[Speculation]._rollouts
    rollouts.forget()
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [drawn.randrange(1, 4000) if one_of and not drawn.randrange(one_of) else token for token in output]
        rollouts.index_of(prompt, b"").add(prompt[-16:] + text)


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, rng, rows = model_of(name, args.device), random.Random(1), []
    greedy = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "use_tqdm": False}
    sampled = {**greedy, "do_sample": True, "temperature": 1.0, "seed": 5}
    with PagedGenerator(model, max_num_seqs=max(args.batches)) as generator:

        def timed(prompts: list[list[int]], **settings: Any) -> tuple[float, list[list[int]], list[int]]:
            before = generator.engine.stats()
            start = time.perf_counter()
            made = generator.generate(prompts, **settings)
            seconds, after = time.perf_counter() - start, generator.engine.stats()
            counts = [getattr(after, field) - getattr(before, field)
                      for field in ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")]
            return seconds, [one.token_ids for one in made], counts

        for batch in args.batches:
            prompts = [[rng.randrange(1, 4000) for _ in range(args.prompt)] for _ in range(batch)]
            recorded = timed(prompts, **greedy)[1]
            for label in args.texts:
                settings, plain, guessing = sampled if label == "sampled" else greedy, [], []
                counts, clock = [0, 0, 0], Clock()
                for run in range(args.runs + 1):
                    generator.engine.reset_prefix_cache()  # which forgets earlier rollouts as well
                    other, others, _ = timed(prompts, **settings)
                    generator.engine.reset_prefix_cache()
                    if label in WRONG:
                        remember(generator, prompts, recorded, WRONG[label])
                    generator.engine.watch(clock)
                    some, texts, counts = timed(prompts, prompt_lookup_num_tokens=DRAFTS, **settings)
                    generator.engine.unwatch(clock)
                    if run:
                        guessing.append(some)
                        plain.append(other)
                same = sum(a == b for a, b in zip(texts, others, strict=True))
                fast, slow = statistics.median(guessing), statistics.median(plain)
                row = {"model": name, "batch": batch, "text": label, "ratio": slow / fast,
                       "rate": batch * args.tokens / fast, "plain": batch * args.tokens / slow, "steps": counts[0],
                       "drafts": counts[1], "accepted": counts[2], "same texts": same}
                rows.append(row)
                share = counts[2] / counts[1] if counts[1] else 0.0
                print(f"{name}, {batch} x {label}: {row['rate']:,.0f} tok/s, {row['ratio']:.3f} of {row['plain']:,.0f};"
                      f" {counts[0]} steps, {counts[1]} guesses, {share:.2f} right, {same} texts the same;"
                      f" a step with guesses, ms: {clock.means()}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "8B"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    results = [row for name in args.models for row in measure(name, args)]
    if args.out:
        with open(args.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
