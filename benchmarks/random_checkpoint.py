"""Write a checkpoint of published Qwen3 shapes with random weights, shard by shard.

    python benchmarks/random_checkpoint.py 32B /dev/shm/qwen3-32B
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from workloads import qwen3_config

SHARD_BYTES = 4 << 30
_WRITERS = 8


def word_tokenizer(size: str, **options: Any) -> PreTrainedTokenizerFast:
    """One token a word of the whole vocabulary: <pad>, <eos>, t2, t3, ..."""
    # The special ones are no part of another word: they are found inside of words, too.
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, qwen3_config(size).vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **options)


def make_checkpoint(size: str, folder: Path) -> float:
    """Write config, safetensors shards and their index to `folder`; returns the seconds it took."""
    start, dtype = time.perf_counter(), torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    config = qwen3_config(size)
    config.dtype = dtype
    with init_empty_weights():
        named = Qwen3ForCausalLM(config).named_parameters()
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    shapes = {name: parameter.shape for name, parameter in named if name != tied}
    shards: list[dict[str, torch.Size]] = [{}]
    held = 0
    for name, shape in shapes.items():
        held += shape.numel() * dtype.itemsize
        if held > SHARD_BYTES:
            shards.append({})
            held = shape.numel() * dtype.itemsize
        shards[-1][name] = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]

    def write(number: int) -> None:
        generator = torch.Generator(device).manual_seed(number)
        tensors = {
            name: torch.ones(shape, dtype=dtype) if "norm" in name
            else torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator).cpu()
            for name, shape in shards[number].items()
        }
        save_file(tensors, folder / files[number], metadata={"format": "pt"})

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(len(shards))))
    where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(f"{make_checkpoint(sys.argv[1], Path(sys.argv[2])):.1f} s")
