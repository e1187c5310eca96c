"""Operations outside of attention that bring the tokens of a packed step together, or put them in order."""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.models.proof.checks.states import ROWS, decoding
from hf_paged.models.proof.interface import is_attending
from hf_paged.models.proof.line_counts import modeling_files
from hf_paged.models.proof.subject import Subject

_TOKENS = (30, 23)  # of two rows: their sum is a prime number, which is the size of no other dim
# What may drop the dim of tokens without bringing them together; whatever else drops it is taken for a reduction.
_MOVING = frozenset({
    "select", "slice", "index", "index_select", "index_copy_", "masked_select", "gather", "nonzero", "split",
    "split_with_sizes", "unbind", "view", "_unsafe_view", "repeat",
})
_ORDERING = frozenset({
    "cumsum", "cumprod", "sort", "argsort", "topk", "_softmax", "_log_softmax", "flip", "roll", "cummax",
    "logcumsumexp", "diff",
})
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul"})
# Places that were read: they count integers, to find the experts that some token goes to, or all positions.
_HARMLESS = ("integrations/moe", "modeling_rope_utils", "expert_mask.sum(dim=(-1, -2))")
# Torch's own look at whether each class is below `num_classes`; a line that takes a maximum itself is another matter.
_ONE_HOT = re.compile(r"(min|max|aminmax) at (?!.*(min|max)\().*\bone_hot\([^()]*\bnum_classes=")


def token_operations(subject: Subject) -> list[str]:
    """Return such operations of one step, each with the line of modeling code that runs it."""
    files = modeling_files(subject.model.modules())
    if subject.states:  # a prompt is a forward of its own: what may meet are decode rows
        steps = decoding(subject)
        with _Watch(ROWS, files) as watch:
            steps.step([(row, [9]) for row in range(ROWS)])
        return watch.texts()
    with _Watch(sum(_TOKENS), files) as watch:
        subject.steps().step([(0, subject.prompts[4][: _TOKENS[0]]), (1, subject.prompts[3][: _TOKENS[1]])])
    return watch.texts()


class _Watch(TorchDispatchMode):
    def __init__(self, tokens: int, files: frozenset[str]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._tokens, self._files = tokens, files

    def texts(self) -> list[str]:
        return sorted(text for text in self.found if not _ONE_HOT.match(text)
                      and not any(known in text for known in _HARMLESS))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_attending():
            name = func._schema.name.split("::")[1]
            if self._mixes(name, args, kwargs or {}, result):
                self.found.add(f"{name} at {self._place()}")
        return result

    def _mixes(self, name: str, args: tuple, kwargs: dict, result: Any) -> bool:
        inputs = [one for one in args if isinstance(one, torch.Tensor)]
        if not any(self._tokens in one.shape for one in inputs):
            return False
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        if not any(isinstance(one, torch.Tensor) and self._tokens in one.shape for one in outputs):
            return name not in _MOVING
        if name in _ORDERING:
            place = 2 if name == "topk" else 1
            given = args[place] if len(args) > place else kwargs.get("dim", -1)
            dims = given if isinstance(given, (list, tuple)) else (given,)
            return any(self._is_tokens(inputs[0], dim) for dim in dims)
        if name == "convolution":
            return self._is_tokens(inputs[0], -1)
        return name in _PRODUCTS and self._is_tokens(inputs[-2], -1)

    def _is_tokens(self, tensor: torch.Tensor, dim: Any) -> bool:
        return (isinstance(dim, int) and not isinstance(dim, bool) and -tensor.dim() <= dim < tensor.dim()
                and tensor.shape[dim] == self._tokens)

    def _place(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self._files or "transformers/integrations/" in file or "modeling_rope_utils" in file:
                return f"{'/'.join(file.split('/')[-2:])}, {frame.f_code.co_name}: {_call(file, frame.f_lineno)[:160]}"
            frame = frame.f_back
        return "an unknown place"


def _call(file: str, line: int) -> str:
    """Return the line of a file, with those behind it up to the end of the call that it begins."""
    text = linecache.getline(file, line).strip()
    while text.count("(") > text.count(")") and (following := linecache.getline(file, line := line + 1)):
        text += " " + following.strip()
    return text
