"""Measure what structured output costs: rows under a JSON schema, rows without, and rows beside such rows.

    python benchmarks/structured_speed.py [--models 0.6B 8B] [--rows 64] [--tokens 256] [--runs 3] [--device cuda]

Random weights of published shapes ("tiny": two small layers, for a CPU) and a vocabulary of as many words, since
neither weights nor words matter. The schema is an array that is not complete before `--tokens`, so that every row
makes as many tokens as a row without. Prompts of 64 tokens, greedy; medians after a warm-up run.
Aims: "schema" at least 0.85 of "plain"; "rows beside" at least 0.95 of "twice the rows".
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from workloads import qwen3

from hf_paged import PagedGenerator
from hf_paged.engine.structured.mask_maker import MaskMaker

ITEM = {
    "type": "object", "required": ["name", "age", "tags", "address"],
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object", "required": ["street", "zip"],
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        },
    },
}
SCHEMA = {"json_schema": {"type": "array", "items": ITEM, "minItems": 1000}}
PROMPT = 64


def words(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `count` tokens: bytes, words with and without something in front, and a few with quotes.

    Of published vocabularies of this size 1 to 2 % of the tokens hold a double quote. It matters, since these are the
    tokens of which a grammar has to be asked one by one inside of a JSON string.
    """
    alphabet, drawn = sorted(ByteLevel.alphabet()), random.Random(0)
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab["<|end|>"] = len(vocab)
    syllables = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    fronts = ("", "", "", "Ġ", "Ġ", "Ġ", "Ġ", "_", "-", ".", "(")
    signs = ('"', '"', ":", ",", "}", "]", "{", "[", "Ġ", ")", "=", ".")
    while len(vocab) < count:
        word = "".join(drawn.choice(syllables) for _ in range(drawn.randint(1, 4)))
        word = word.capitalize() if drawn.random() < 0.2 else word
        if drawn.random() < 0.015:
            quoted = "".join(drawn.choice(signs) for _ in range(drawn.randint(1, 5)))
            word = quoted + (word if drawn.random() < 0.2 else "")
        vocab.setdefault(drawn.choice(fronts) + word, len(vocab))
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def model_of(name: str, device: str) -> Any:
    if name != "tiny":
        return qwen3(name, torch.bfloat16, device)
    config = Qwen3Config(vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    return Qwen3ForCausalLM(config).eval().to(device)


class Clock:
    """Adds up the seconds that making masks takes."""

    def __init__(self) -> None:
        self.seconds, self.steps, fill = 0.0, 0, MaskMaker._fill_batch

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            fill(*args)
            self.seconds, self.steps = self.seconds + time.perf_counter() - start, self.steps + 1

        MaskMaker._fill_batch = timed  # type: ignore[method-assign]

    def mean(self) -> float:
        """Of the steps since the last call."""
        mean = self.seconds / max(1, self.steps)
        self.seconds, self.steps = 0.0, 0
        return mean


def measure(name: str, args: argparse.Namespace, clock: Clock) -> dict[str, float]:
    model = model_of(name, args.device)
    tokenizer, rng = words(model.config.vocab_size - 200), random.Random(1)
    prompts = [[rng.randrange(1, 4000) for _ in range(PROMPT)] for _ in range(2 * args.rows)]
    alone, both = prompts[: args.rows], [None] * args.rows + [SCHEMA] * args.rows
    variants: dict[str, tuple[list[list[int]], Any]] = {
        "plain": (alone, None), "schema": (alone, SCHEMA), "twice the rows": (prompts, None),
        "rows beside": (prompts, both),
    }
    settings: dict[str, Any] = {"max_new_tokens": args.tokens, "eos_token_id": tokenizer.eos_token_id,
                                "min_new_tokens": args.tokens, "use_tqdm": False}
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    masks: dict[str, float] = {}
    with PagedGenerator(model, tokenizer, max_num_seqs=2 * args.rows, enable_prefix_caching=False) as generator:
        for turn in range(args.runs + 1):
            for variant, (given, structured) in variants.items():
                clock.mean()
                start = time.perf_counter()
                made = generator.generate(given, structured=structured, **settings)
                seconds = time.perf_counter() - start
                assert all(len(one.token_ids) == args.tokens for one in made), [one.error for one in made]
                if turn:
                    rates[variant].append(len(given) * args.tokens / seconds)
                    masks[variant] = clock.mean()
    found = {variant: statistics.median(values) for variant, values in rates.items()}
    for variant, rate in found.items():
        against = found["plain" if variant == "schema" else "twice the rows"]
        ratio = f", {rate / against:.3f}" if variant in ("schema", "rows beside") else ""
        took = f", masks {masks[variant] * 1e6:,.0f} us a step" if masks[variant] else ""
        print(f"{name}, {variant}: {rate:,.0f} tok/s{ratio}{took}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "8B"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    clock = Clock()
    results = {name: measure(name, args, clock) for name in args.models}
    if args.out:
        with open(args.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
