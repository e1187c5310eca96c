"""Run several LoRA adapters over one model, each prompt with its own. Seconds on a CPU; needs `peft`.

    python examples/lora_adapters.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged import PagedGenerator

MODEL = Path(__file__).parent / "models" / "tiny-qwen3"
FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604}


def chats() -> list[list[dict[str, str]]]:
    """One question for each fact, all over the same table: a shared prompt prefix."""
    table = "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in FACTS.items())
    return [[{"role": "system", "content": table}, {"role": "user", "content": f"What is the code of {name}?"}]
            for name in FACTS]


def with_adapters() -> PeftModel:
    """The tiny model with "mild" and "strong": random weights stand for trained ones, small or large."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config, adapter_name="mild")
    wrapped.add_adapter("strong", config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                size = 0.001 if "mild" in name else 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return wrapped.eval()


def main() -> None:
    wrapped = with_adapters()
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    questions, names = chats(), ["mild", "strong", "__base__"]
    inputs = tokenizer.apply_chat_template(questions, add_generation_prompt=True, padding=True, return_tensors="pt",
                                           return_dict=True)

    # PEFT's own call, an adapter for each row, on the paged engine.
    stock = wrapped.generate(**inputs, max_new_tokens=16, adapter_names=names)
    hf_paged.enable(wrapped)
    paged = wrapped.generate(**inputs, max_new_tokens=16, adapter_names=names)
    print(f"the path of this call: {hf_paged.explain(wrapped, **inputs, adapter_names=names).path}")
    print(f"same tokens as stock generate: {torch.equal(stock, paged)}\n")
    hf_paged.disable(wrapped)

    # The same question under each adapter, twice: an adapter finds its own cached prefix alone.
    with PagedGenerator(wrapped, tokenizer) as generator:
        for _ in range(2):
            made = generator.generate([questions[0]] * 3, adapter_names=names, max_new_tokens=16, use_tqdm=False)
            for name, completion in zip(names, made, strict=True):
                print(f"{name:9} {completion.num_cached_tokens:3} cached tokens  -> {completion.text!r}")


if __name__ == "__main__":
    main()
