"""Evaluate a model on questions of one's own: answers compared with the right ones, and choices by likelihood.

    python examples/evaluate.py

All questions run in one batch over one long prefix (the table), which is computed once. `lm-eval` and lighteval run
over an enabled model as well (docs/callers.md).
"""

from __future__ import annotations

import random
from pathlib import Path

from hf_paged import PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"
FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604, "wild-goat": 5518, "icy-seal": 2046, "calm-bear": 9182}


def chat(name: str) -> list[dict[str, str]]:
    table = "Codes:\n" + "\n".join(f"{known}: {code}" for known, code in FACTS.items())
    return [{"role": "system", "content": table}, {"role": "user", "content": f"What is the code of {name}?"}]


def exact_match(generator: PagedGenerator) -> float:
    """Share of the questions whose greedy answer holds the code."""
    answers = generator.generate([chat(name) for name in FACTS], max_new_tokens=24, do_sample=False)
    return sum(str(FACTS[name]) in answer.text for name, answer in zip(FACTS, answers, strict=True)) / len(FACTS)


def log_likelihoods(generator: PagedGenerator, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """log p(choice | question) of each pair of token ids: the choice is scored as the end of a prompt."""
    prompts = [question + choice for question, choice in pairs]
    scored = generator.generate(prompts, max_new_tokens=1, do_sample=False, prompt_logprobs=True)
    return [sum(one.prompt_logprobs[len(question) :]) for one, (question, _) in zip(scored, pairs, strict=True)]


def multiple_choice(generator: PagedGenerator, rng: random.Random, num_choices: int = 4) -> float:
    """Share of the questions for which the right one of the choices is the most likely answer."""
    tokenizer, pairs, right = generator.tokenizer, [], []
    for name, code in FACTS.items():
        question = tokenizer.apply_chat_template(chat(name), add_generation_prompt=True, return_dict=False)
        choices = [code, *rng.sample([other for other in FACTS.values() if other != code], num_choices - 1)]
        rng.shuffle(choices)
        right.append(choices.index(code))
        pairs += [(question, tokenizer.encode(f"{name}: {choice}", add_special_tokens=False)) for choice in choices]
    scores = log_likelihoods(generator, pairs)
    by_question = [scores[i : i + num_choices] for i in range(0, len(scores), num_choices)]
    best = [max(range(num_choices), key=of_one.__getitem__) for of_one in by_question]
    return sum(found == wanted for found, wanted in zip(best, right, strict=True)) / len(right)


def main() -> tuple[float, float]:
    with PagedGenerator.from_pretrained(MODEL, dtype="float32") as generator:
        matched, chosen = exact_match(generator), multiple_choice(generator, random.Random(0))
        stats = generator.engine.stats()
    print(f"exact match {matched:.0%}, multiple choice {chosen:.0%}")
    print(f"{stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens came from the prefix cache")
    return matched, chosen


if __name__ == "__main__":
    main()
