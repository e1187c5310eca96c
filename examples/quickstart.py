"""Run a model on the paged engine, checked against stock generate and timed beside it. Seconds on a CPU.

    python examples/quickstart.py

The prompts are those of a few-shot evaluation: a long common start, and a question of their own. The engine computes
the start once, and stock generate once for every row, so on this batch the difference is plain even for a tiny model on
a CPU. docs/performance.md has the figures of models and GPUs that are in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged import PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"  # trained by tools/train_tiny_qwen3.py to look facts up

FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604, "wild-goat": 5518, "icy-seal": 2046, "calm-bear": 9182}
NUM_CHATS, NUM_SHOTS, NUM_RUNS = 48, 5, 2


def example_chats() -> list[list[dict[str, str]]]:
    """One question for each fact, all over the same table: a shared prompt prefix."""
    return [[_table(), _question(name)] for name in FACTS]


def few_shot_chats() -> list[list[dict[str, str]]]:
    """Questions behind a table and answered questions, which are the same for all."""
    shots = [turn for name in list(FACTS)[:NUM_SHOTS]
             for turn in (_question(name), {"role": "assistant", "content": f"{name}: {FACTS[name]}"})]
    names = list(FACTS) * (NUM_CHATS // len(FACTS))
    return [[_table(), *shots, _question(name)] for name in names]


def _table() -> dict[str, str]:
    return {"role": "system", "content": "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in FACTS.items())}


def _question(name: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the code of {name}?"}


def timed(call: Callable[[], torch.Tensor], before: Callable[[], object] = lambda: None) -> tuple[torch.Tensor, float]:
    """What a call returns, and the seconds of its best run behind one that warms up."""
    seconds = []
    for _ in range(1 + NUM_RUNS):
        before()
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds[1:])


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    inputs = tokenizer.apply_chat_template(few_shot_chats(), add_generation_prompt=True, padding=True,
                                           return_tensors="pt", return_dict=True)
    rows, width = inputs["input_ids"].shape
    stock, stock_seconds = timed(lambda: model.generate(**inputs, max_new_tokens=24))

    hf_paged.enable(model)  # the same object, the same weights
    engine = hf_paged.get_engine(model)
    # Nothing may be left of the run before: each computes the common start itself.
    paged, paged_seconds = timed(lambda: model.generate(**inputs, max_new_tokens=24), before=engine.reset_prefix_cache)

    computed = engine.stats().num_prefill_tokens // (1 + NUM_RUNS)
    print(f"model.generate on {rows} chats of {width} tokens: stock {stock_seconds:.2f} s, paged {paged_seconds:.2f} s "
          f"({stock_seconds / paged_seconds:.1f} times as fast)")
    print(f"same tokens as stock generate: {torch.equal(stock, paged)}")
    print(f"prompt tokens computed: stock {rows * width:,}, paged {computed:,}\n")
    hf_paged.disable(model)

    chats = example_chats()
    with PagedGenerator(model, tokenizer) as generator:
        for chat, completion in zip(chats, generator.generate(chats, max_new_tokens=24), strict=True):
            print(f"{chat[-1]['content']:40} -> {completion.text}   ({completion.finish_reason})")
        print("\nstreamed: ", end="")
        for _, output in generator.stream(chats[0], max_new_tokens=24):
            print(output.new_text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
