"""Arguments of calls with images, as processors make them, for the tiny models of `image_models`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from image_models import END, IMAGE, START, image_model
from transformers import PreTrainedModel

from hf_paged.engine.engine import Engine
from hf_paged.models.images.fed_prompt import DEEPSTACK, FedPrompt, FedRun
from hf_paged.sampling.log_probs import RAW

_TYPED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
PATCHES = (*_TYPED, "kimi_k25", "lfm3_vl")
_PADDED, _TILED, _SIZED = ("smolvlm", "idefics3"), ("llava_next", "llava_onevision"), ("mistral3",)
Part = int | str | list[int]


def seeing_model(name: str, **text: Any) -> PreTrainedModel:
    """Return the model of this name with weights with which each of its images changes the tokens; ``text``: settings
    of its text."""
    model: Any = image_model(name, **text)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        for key, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.35 if "embed" in key or "lm_head" in key else 0.25)
    return model


def image_call(model: PreTrainedModel, rows: Sequence[Sequence[Part]], **changed: Any) -> dict[str, torch.Tensor]:
    """Return the arguments of a call, padded on the left.

    Args:
        rows: Parts of each prompt: a number of tokens of text, ids, or an image by its name "0", "1", ..., which says
            its size and its pixels; names that differ by 4 have the same size.
        changed: Arguments to put in place of those made.
    """
    ids, named = [], []
    for row in rows:
        generator, tokens = torch.Generator().manual_seed(5), [1]
        for part in row:
            if isinstance(part, str):
                tokens += [START, *[IMAGE] * num_placeholders(model, part), END]
            else:
                if isinstance(part, int):
                    part = torch.randint(3, 200, (part,), generator=generator).tolist()
                tokens += part
        ids.append(tokens)
        named.append([part for part in row if isinstance(part, str)])
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    found = {"input_ids": padded, "attention_mask": mask, **_types(model, padded)}
    if any(named):
        found |= _tower_inputs(model, named)
    return found | changed


def num_placeholders(model: PreTrainedModel, image: str) -> int:
    """Return how many tokens of a prompt an image takes: as many as the tower gives rows."""
    body: Any = model.model
    names = inspect.signature(body.get_image_features).parameters
    options = {name: getattr(model.config, name) for name in ("vision_feature_layer", "vision_feature_select_strategy")
               if name in names}
    with torch.no_grad():
        found = body.get_image_features(**_tower_inputs(model, [[image]]), return_dict=True, **options)
    return len(found.pooler_output[0])


def with_log_probabilities(model: PreTrainedModel, call: dict[str, Any]) -> tuple[torch.Tensor, list[list[float]]]:
    """Return the result of a call of an enabled model, and the log-probabilities of the new tokens of each row."""
    found, add, advance = {}, Engine.add, Engine.advance

    def heard(self, *args, **kwargs):
        outputs = advance(self, *args, **kwargs)
        found.update((output.request_id, output.completion) for output in outputs[0] if output.completion)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "add", lambda self, session, spec: add(self, session, spec.but(logprobs=RAW)))
        patch.setattr(Engine, "advance", heard)
        result = model.generate(**call)
    return result, [found[key].logprobs for key in sorted(found)]


def _types(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    kind = model.config.model_type
    if kind in _TYPED or kind == "gemma4":
        return {"mm_token_type_ids": (ids == IMAGE).long()}
    return {"token_type_ids": (ids == IMAGE).long()} if kind == "gemma3" else {}


def _tower_inputs(model: PreTrainedModel, named: list[list[str]]) -> dict[str, torch.Tensor]:
    given = [_one(model, int(image)) for row in named for image in row]
    if model.config.model_type not in _PADDED:
        # Of the patches of images one beside the other, a batch of one.
        beside = {"pixel_values": 3} if "target_sizes" in given[0] else {}
        return {name: torch.cat([one[name] for one in given], beside.get(name, 0)) for name in given[0]}
    pixels, images = torch.zeros(len(named), max(map(len, named)), 3, 16, 16), iter(given)
    for line, row in zip(pixels, named, strict=True):
        for place, _ in enumerate(row):
            line[place] = next(images)["pixel_values"][0]
    return {"pixel_values": pixels}


def _one(model: PreTrainedModel, image: int) -> dict[str, torch.Tensor]:
    """Return the tower's arguments for one image."""
    kind, tower, generator = model.config.model_type, model.config.vision_config, torch.Generator().manual_seed(image)
    if kind in PATCHES:
        height, width = [(4, 4), (4, 8), (8, 4), (6, 4)][image % 4]
        channels = getattr(tower, "in_channels", getattr(tower, "num_channels", 3))
        size = channels * getattr(tower, "temporal_patch_size", 1) * tower.patch_size**2
        shape = (3, tower.patch_size, tower.patch_size) if kind == "kimi_k25" else (size,)
        return {"pixel_values": torch.randn(height * width, *shape, generator=generator),
                "image_grid_thw": torch.tensor([[1, height, width]])}
    if kind == "gemma4":
        height, width = [(4, 4), (4, 6), (4, 2), (2, 4)][image % 4]
        places, pixels = torch.full((24, 2), -1), torch.zeros(24, 3 * tower.patch_size**2)
        grid = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
        places[: height * width] = torch.stack(grid, -1).reshape(-1, 2)
        pixels[: height * width] = torch.rand(height * width, 3 * tower.patch_size**2, generator=generator)
        return {"pixel_values": pixels[None], "image_position_ids": places[None]}
    if kind == "minicpmv4_6":
        height, width = [(8, 8), (4, 8), (8, 4), (8, 12)][image % 4]
        pixels = torch.randn(1, 3, tower.patch_size, height * width * tower.patch_size, generator=generator)
        return {"pixel_values": pixels, "target_sizes": torch.tensor([[height, width]], dtype=torch.int32)}
    if kind == "lfm2_vl":
        height, width = [(4, 4), (4, 6), (2, 4), (6, 4)][image % 4]
        pixels, mask = torch.zeros(1, 24, 3 * tower.patch_size**2), torch.zeros(1, 24, dtype=torch.long)
        pixels[:, : height * width] = torch.randn(height * width, pixels.shape[2], generator=generator)
        mask[:, : height * width] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[height, width]])}
    if kind in _TILED:
        size = [(16, 32), (32, 16), (32, 32), (16, 16)][image % 4]
        return {"pixel_values": torch.randn(1, 5, 3, 16, 16, generator=generator), "image_sizes": torch.tensor([size])}
    if kind in _SIZED:
        height, width = [(16, 16), (32, 16), (16, 32), (32, 32)][image % 4]
        pixels = torch.zeros(1, 3, 32, 32)
        pixels[:, :, :height, :width] = torch.randn(1, 3, height, width, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


def ending_on_an_image(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A prompt whose last token is an image's."""
    call = image_call(model, [[4, "1"]])
    return {name: value[:, :-1] if value.shape == call["input_ids"].shape else value for name, value in call.items()}


# What a prompt with images is fed, with a part left out: controls of tests that have to notice it.


def without_positions(prompt: FedPrompt) -> FedPrompt:
    return dataclasses.replace(prompt, positions=None)


def without_spans(prompt: FedPrompt) -> FedPrompt:
    return dataclasses.replace(prompt, sights={})


def with_cut_spans(prompt: FedPrompt) -> FedPrompt:
    """Chunks end anywhere."""
    class Other(FedPrompt):
        def chunk_end(self, first: int, end: int) -> int:
            return end

    return Other(prompt.ids, prompt.runs, prompt.positions, prompt.sights)


def without_adds(prompt: FedPrompt) -> FedPrompt:
    """Nothing behind layers."""
    runs = (FedRun(run.first, run.identity, {name: rows for name, rows in run.rows.items() if name != DEEPSTACK})
            for run in prompt.runs)
    return dataclasses.replace(prompt, runs=tuple(runs))
