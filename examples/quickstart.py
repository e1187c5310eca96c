"""A model on the paged engine in ten lines, checked against stock generate. Runs on a CPU in seconds.

    python examples/quickstart.py
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged import PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"  # trained by tools/train_tiny_qwen3.py to look facts up

FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604, "wild-goat": 5518, "icy-seal": 2046, "calm-bear": 9182}


def example_chats() -> list[list[dict[str, str]]]:
    """One question for each fact, all over the same table: a shared prompt prefix."""
    table = "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in FACTS.items())
    return [
        [{"role": "system", "content": table}, {"role": "user", "content": f"What is the code of {name}?"}]
        for name in FACTS
    ]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    chats = example_chats()
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )

    start = time.perf_counter()
    stock = model.generate(**inputs, max_new_tokens=24)
    stock_seconds = time.perf_counter() - start

    hf_paged.enable(model)  # the same object, the same weights
    start = time.perf_counter()
    paged = model.generate(**inputs, max_new_tokens=24)
    paged_seconds = time.perf_counter() - start

    stats = hf_paged.get_engine(model).stats()
    print(f"model.generate on {len(chats)} chats: stock {stock_seconds:.2f} s, paged {paged_seconds:.2f} s")
    print(f"same tokens as stock generate: {torch.equal(stock, paged)}")
    print(f"prompt tokens found in the prefix cache: {stats.prefix_cache_hits} of {stats.prefix_cache_queries}\n")
    hf_paged.disable(model)

    with PagedGenerator(model, tokenizer) as generator:
        for chat, completion in zip(chats, generator.generate(chats, max_new_tokens=24), strict=True):
            print(f"{chat[-1]['content']:40} -> {completion.text}   ({completion.finish_reason})")
        print("\nstreamed: ", end="")
        for _, output in generator.stream(chats[0], max_new_tokens=24):
            print(output.new_text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
