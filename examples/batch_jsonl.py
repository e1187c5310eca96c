"""Answer a file of prompts, a line each, written as they come; a run that was stopped continues where it was.

    python examples/batch_jsonl.py [prompts.jsonl] [answers.jsonl] [--model PATH] [--max-new-tokens 24]

A line of the input is ``{"id": ..., "prompt": text, chat or token ids}``, with any fields of a `GenerationConfig` under
``"settings"``. A line of the output has the id, text, tokens, finish_reason and, of a prompt that cannot run, an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import GenerationConfig

from hf_paged import PagedGenerator

HERE = Path(__file__).parent


def lines_of(path: Path) -> list[dict]:
    """JSON lines of a file; a last one that was not written to its end is left out, and nothing if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def main(arguments: list[str] | None = None) -> int:
    """The number of prompts that were answered in this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="?", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("answers", nargs="?", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--model", default=str(HERE / "models" / "tiny-qwen3"))
    parser.add_argument("--max-new-tokens", type=int, default=24)
    given = parser.parse_args(arguments)
    done = lines_of(given.answers)
    given.answers.write_text("".join(json.dumps(line) + "\n" for line in done))  # without a broken last line
    known = {line["id"] for line in done}
    asked = [line for line in lines_of(given.prompts) if line["id"] not in known]
    if not asked:
        return 0
    settings = [GenerationConfig(**{"max_new_tokens": given.max_new_tokens, **line.get("settings", {})})
                for line in asked]
    with PagedGenerator.from_pretrained(given.model) as generator, given.answers.open("a") as file:
        for index, output in generator.stream([line["prompt"] for line in asked], settings, on_error="complete"):
            if (made := output.completion) is not None:
                answer = {"id": asked[index]["id"], "text": made.text, "token_ids": made.token_ids,
                          "finish_reason": made.finish_reason, "error": made.error}
                file.write(json.dumps(answer) + "\n")
                file.flush()
    return len(asked)


if __name__ == "__main__":
    print(f"{main()} prompts answered")
