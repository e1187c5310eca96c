"""Processors of tiny image-text models, made in memory, and the models that they belong to."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from image_calls import seeing_model
from image_models import END, IMAGE, START, VIDEO
from support import byte_tokenizer, stock_generate
from transformers import (
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)

pil = pytest.importorskip("PIL.Image")
_pil_processors = pytest.importorskip("transformers.models.llava.image_processing_pil_llava")

MARKS = {IMAGE: "<image>", VIDEO: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
# By model: what its template writes for an image.
PLACES = {"llava": MARKS[IMAGE], "qwen2.5-vl": MARKS[START] + MARKS[IMAGE] + MARKS[END], "gemma3": MARKS[START],
          "idefics3": MARKS[IMAGE], "qwen3.5": MARKS[START] + MARKS[IMAGE] + MARKS[END]}


class _WithoutVideos:
    """Of which the processor needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, None, **kwargs)  # type: ignore[call-arg]


class QwenProcessor(_WithoutVideos, Qwen2_5_VLProcessor):
    pass


class Qwen3Processor(_WithoutVideos, Qwen3VLProcessor):
    pass


def processor(name: str) -> Any:
    """Return the processor of the model of this name."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer, padding_side="left", pad_token="!", eos_token="<|end|>",
        extra_special_tokens={"image_token": MARKS[IMAGE], "boi_token": MARKS[START], "eoi_token": MARKS[END],
                              "video_token": MARKS[VIDEO]})
    template = TEMPLATE.replace("IMAGE", PLACES[name])
    if name in ("qwen2.5-vl", "qwen3.5"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        images: Any = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 256})
        kind = QwenProcessor if name == "qwen2.5-vl" else Qwen3Processor
        return kind(images, tokenizer, chat_template=template)
    if name == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=16)
    if name == "idefics3":  # each image in tiles, beside it as a whole
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    images = _pil_processors.LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return LlavaProcessor(images, tokenizer, patch_size=4, vision_feature_select_strategy="default",
                          num_additional_image_tokens=1, image_token=MARKS[IMAGE], chat_template=template)


def model_of(made: Any, name: str, **text: Any) -> PreTrainedModel:
    """Return the model of a processor, with weights with which each image changes the tokens; ``text``: settings of its
    text."""
    marks = {old: made.tokenizer.convert_tokens_to_ids(mark) for old, mark in MARKS.items()}
    return seeing_model(name, marks=marks, vocab_size=len(made.tokenizer), **text)


def image(number: int, width: int = 16, height: int = 16) -> Any:
    """Return an image of random pixels."""
    pixels = np.random.RandomState(number).randint(0, 255, (height, width, 3), dtype=np.uint8)
    return pil.fromarray(pixels)


def data_url(picture: Any, kind: str = "PNG") -> str:
    """Return a data URL of an image, or of bytes."""
    if not isinstance(picture, bytes):
        file = io.BytesIO()
        picture.save(file, kind)
        picture = file.getvalue()
    return f"data:image/{kind.lower()};base64,{base64.b64encode(picture).decode()}"


def user(*parts: Any) -> dict[str, Any]:
    """Return a message with texts and images."""
    return {"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part if isinstance(
        part, dict) else {"type": "image", "image": part} for part in parts]}


def stock_answer(model: Any, made: Any, chat: list[dict[str, Any]], template: dict[str, Any] | None = None,
                 **settings: Any) -> tuple[list[int], list[int]]:
    """Return the prompt and the new tokens of stock's `generate` for a chat."""
    inputs = made.apply_chat_template(
        [{**message} for message in chat], tokenize=True, return_dict=True, return_tensors="pt",
        **{"add_generation_prompt": True, **(template or {})})
    inputs = inputs.to(model.device)
    width = inputs["input_ids"].shape[1]
    tokens = stock_generate(model, **inputs, **settings)[0].tolist()
    return tokens[:width], tokens[width:]
