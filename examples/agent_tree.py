"""Grow a tree of conversations, as agents that try several ways do: branches share the cache of their common start.

    python examples/agent_tree.py

Each node asks one more question behind the conversation so far. All nodes of a level run in one batch, and of a node's
prompt only what is new since its parent is computed. `hf_paged.trace` and `Engine.draw_cache` show it at work.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hf_paged import PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"
FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604, "wild-goat": 5518, "icy-seal": 2046, "calm-bear": 9182}
TABLE = "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in FACTS.items())
BRANCHES, DEPTH = 2, 3


class Node(NamedTuple):
    """A conversation that ends with an answer; ``cached`` of its ``prompt`` tokens came from the prefix cache."""

    messages: list[dict[str, str]]
    level: int
    prompt: int
    cached: int


def grow(generator: PagedGenerator, leaves: list[list[dict[str, str]]], level: int) -> list[Node]:
    """Every leaf's branches: another question each, and its answer."""
    names = list(FACTS)
    asked = [[*leaf, {"role": "user", "content": f"What is the code of {names[(i + branch) % len(names)]}?"}]
             for i, leaf in enumerate(leaves) for branch in range(BRANCHES)]
    made = generator.generate(asked, max_new_tokens=24, do_sample=False)
    return [Node([*chat, {"role": "assistant", "content": answer.text}], level, len(answer.prompt_token_ids),
                 answer.num_cached_tokens) for chat, answer in zip(asked, made, strict=True)]


def main() -> list[Node]:
    nodes: list[Node] = []
    with PagedGenerator.from_pretrained(MODEL, dtype="float32") as generator:
        leaves: list[list[dict[str, str]]] = [[{"role": "system", "content": TABLE}]]
        for level in range(1, DEPTH + 1):
            grown = grow(generator, leaves, level)
            nodes += grown
            leaves = [node.messages for node in grown]
            prompt, cached = sum(node.prompt for node in grown), sum(node.cached for node in grown)
            print(f"level {level}: {len(grown)} conversations, {cached} of {prompt} prompt tokens from the cache")
    return nodes


if __name__ == "__main__":
    main()
