"""Checks that a class computes by FlashAttention what it computes by eager attention, which a proof can run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from hf_paged.models.proof.calls import AttentionRecord
from hf_paged.models.proof.line_counts import modeling_files, parsed
from hf_paged.models.proof.verdict import Refused


def check_flash(model: nn.Module, body: str, calls: Iterable[AttentionRecord]) -> None:
    """Raise `Refused` if modules hand down other windows than their masks have, or code asks which attention runs.

    ``body``: path of the module that makes the calls.
    """
    for call in calls:
        if not getattr(model.get_submodule(call.module), "is_causal", False):
            raise Refused(f"{call.module} is not causal without a mask, as FlashAttention runs it")
        window = {"full": None, "sliding": call.mask.size}.get(call.mask.name, ...)
        if call.window != window:
            raise Refused(f"{call.module} gives FlashAttention a window of {call.window}, and its mask is {call.mask}")
    for file in sorted(modeling_files([model, *model.get_submodule(body).modules()])):
        if asked := next(_questions(parsed(file)), None):
            raise Refused(f"{Path(file).name} asks which attention runs: {asked}")


def _questions(tree: ast.Module) -> Iterator[str]:
    """Yield expressions about the attention implementation, but those that look its function up."""
    looked_up = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface"
                 for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in looked_up or isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                is_question = name != "FlashAttentionKwargs" and ("_attn_implementation" in name or "flash" in name)
            case ast.Constant(value="_attn_implementation" | "_attn_implementation_internal"):
                is_question = True
            case _:
                is_question = False
        if is_question:
            yield ast.unparse(node)
