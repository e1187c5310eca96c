"""Extract facts from text as JSON of a schema, beside free text. Seconds on a CPU; needs `hf-paged[structured]`.

    python examples/structured_extraction.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged import PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"
FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604}
CODE = {
    "type": "object", "required": ["name", "code"],
    "properties": {"name": {"enum": [*FACTS]}, "code": {"type": "string", "pattern": "^[0-9]{4}$"}},
}


def chats() -> list[list[dict[str, str]]]:
    """One question for each fact, all over the same table: a shared prompt prefix."""
    table = "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in FACTS.items())
    return [[{"role": "system", "content": table}, {"role": "user", "content": f"What is the code of {name}?"}]
            for name in FACTS]


def main() -> None:
    questions = chats()
    with PagedGenerator.from_pretrained(MODEL, dtype="float32") as generator:
        # One form for all prompts. Every answer can be read, whatever the model knows.
        form = {"json_schema": CODE, "any_whitespace": False}
        for made in generator.generate(questions, structured=form, max_new_tokens=64, use_tqdm=False):
            print("JSON:", json.loads(made.text), made.finish_reason)

        # Each prompt its own form, or none; they run in the same steps.
        forms = [{"regex": "[0-9]{4}"}, None, {"choice": ["I know", "I do not know"]}]
        for form, made in zip(forms, generator.generate(questions, structured=forms, max_new_tokens=32, use_tqdm=False),
                              strict=True):
            print(f"{form} -> {made.text!r}")

        # What cannot be compiled is an error of its prompt alone.
        forms = [{"regex": "[0-9"}, {"regex": "[0-9]{4}"}, None]
        for made in generator.generate(questions, structured=forms, max_new_tokens=32, on_error="complete",
                                       use_tqdm=False):
            print("error:" if made.error else "text:", made.error or made.text)

    # The same by `model.generate` of an enabled model, in batches and with beams.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    hf_paged.enable(model)
    inputs = tokenizer.apply_chat_template(questions, add_generation_prompt=True, padding=True, return_tensors="pt",
                                           return_dict=True)
    for beams in (1, 3):
        made = model.generate(**inputs, structured={"regex": "[0-9]{4}"}, tokenizer=tokenizer, num_beams=beams,
                              max_new_tokens=16)
        texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{beams} beam(s): {texts}")


if __name__ == "__main__":
    main()
