"""Conditions of modeling code of which only one way ran, and that the config alone does not decide."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_paged.models.proof.line_counts import LineCounts, parsed

# Operands of conditions that were read, and found to change no logits of a packed step.
_HARMLESS = frozenset({
    "x.device.type != 'mps'", "expert_idx == self.num_experts", "n_rep == 1", "is_cross_attention",
    "layer_type is None", "theta", "i == self.first_kv_shared_layer_idx",
    # Of recurrent layers: what a layer's sizes and settings, and installed packages, decide.
    "num_k_heads != num_v_heads", "use_qk_l2norm_in_kernel", "output_final_state", "dt_softplus", "delta_softplus",
    "use_associative_scan", "use_mambapy",
    "len(input_tensor.shape) == 4", "token_idx.numel() == 0",
    "hidden_states.shape[1] == (input_ids if input_ids is not None else inputs_embeds).shape[1]",
    # Of positions by axis; steps give one row.
    "position_ids.shape[0] == 4", "position_ids.shape[0] == num_mrope_axes + 1",
})
_COMPARED = frozenset({"layer_type", "position_ids.ndim"})  # the same of names that are compared with a constant
_NO_ENCODER = frozenset({"is_cross_attention"})  # names that are false in a decoder
# Methods that stock's `generate` runs for native calls, too: the inputs that they make are looked at behind them.
_PREPARING = ("__init__", "_expand_inputs_for_generation", "_prepare_position_ids_for_generation")
# Arguments of a forward: which of them are given is the same in every step.
_ARGUMENTS = {
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "labels", "kwargs", "logits_to_keep",
    "output_router_logits", "inputs_embeds", "input_ids", "attention_mask", "cache", "past_key_values",
    "position_ids", "encoder_hidden_states", "config",
}
_FIXED_CALLS = ("isinstance", "hasattr", "getattr", "is_torchdynamo_compiling", "is_tracing",
                "torch.jit.is_tracing", "callable")


def one_way_conditions(lines: LineCounts) -> list[str]:
    """Return the conditions of functions that ran, of which one way did not, each as a sentence's part."""
    found = {text for file in lines.files for function in ast.walk(parsed(file))
             if isinstance(function, ast.FunctionDef) and function.name not in _PREPARING
             for text in _of_function(lines, file, function)}
    return sorted(found)


def _of_function(lines: LineCounts, file: str, function: ast.FunctionDef) -> Iterator[str]:
    known, (absent, empty) = _fixed_locals(function), _nothing_given(lines, file, function)
    for node in _without_inner(function):
        if (not isinstance(node, (ast.If, ast.While, ast.IfExp)) or not lines.ran(file, node)
                or is_harmless(node.test, known) or _truth(node.test, absent, empty | _NO_ENCODER) is not None):
            continue
        test = f"`{ast.unparse(node.test)[:90]}` in {function.name}"
        if isinstance(node, ast.IfExp):  # lines do not tell which way it took
            yield f"it is not known which ways {test} took"
            continue
        yes = lines.ran(file, node.body[0])
        no = lines.ran(file, node.orelse[0]) if node.orelse else lines.ran(file, node) - yes
        if yes <= 0 or no <= 0:
            yield f"{test} was never {'true' if yes <= 0 else 'false'}"


def _without_inner(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield all nodes of a function but those of functions inside, which are looked at by themselves."""
    inner = {id(node) for one in ast.walk(function) if isinstance(one, ast.FunctionDef) and one is not function
             for node in ast.walk(one)}
    return (node for node in ast.walk(function) if id(node) not in inner)


def unseen_code(lines: LineCounts, model: nn.Module) -> list[str]:
    """Return the functions and modules of compilers whose lines are not counted, each as a sentence's part."""
    spaces: list[Mapping[str, Any]] = [
        vars(module) for module in list(sys.modules.values()) if getattr(module, "__file__", None) in lines.files]
    for module in model.modules():
        spaces += [{type(module).__name__: module}, vars(module), *map(vars, type(module).__mro__)]
    found = {name for space in spaces for name, value in list(space.items()) if any(map(_is_compiled, _held(value)))}
    return [f"{name} is compiled, so that its conditions are not seen" for name in sorted(found)]


def _held(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple, set)) else [value]


def _is_compiled(value: Any) -> bool:
    if isinstance(value, nn.Module):  # torch._dynamo takes seconds to import
        return (isinstance(value, torch.jit.ScriptModule) or type(value).__name__ == "OptimizedModule"
                or value._compiled_call_impl is not None)
    if isinstance(value, FunctionType):  # `torch.compiler.disable` makes one, too, that runs as it stands
        return "_torchdynamo_orig_callable" in vars(value) and not vars(value).get("_torchdynamo_disable")
    return isinstance(value, torch.jit.ScriptFunction)


def _fixed_locals(function: ast.FunctionDef) -> frozenset[str]:
    """Return the names that a function sets once, to what `self` and the config alone decide."""
    stored = Counter(node.id for node in ast.walk(function)
                     if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return frozenset(
        target.id for node in ast.walk(function) if isinstance(node, ast.Assign) for target in node.targets
        if isinstance(target, ast.Name) and stored[target.id] == 1 and is_fixed(node.value)
        and all(one.id in ("self", "config") for one in ast.walk(node.value) if isinstance(one, ast.Name)))


def _nothing_given(lines: LineCounts, file: str, function: ast.FunctionDef) -> tuple[set[str], set[str]]:
    """Return the arguments that stay None in each call of a function, and those that are None or an empty dict."""
    absent, empty = lines.not_given(file, function)
    stores = Counter(node.id for node in ast.walk(function)
                     if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    texts = {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Assign)}
    return ({name for name in absent if not stores[name]}, {
        name for name in empty
        if not stores[name] or (stores[name] == 1 and f"{name} = {name} if {name} is not None else {{}}" in texts)})


def _truth(test: ast.expr, absent: Collection[str], empty: Collection[str]) -> bool | None:
    """Return what a condition is if the names ``absent`` are None, and ``empty`` None or empty dicts; else None."""
    match test:
        case ast.Name(id=name) if name in empty:
            return False
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as operator],
                         comparators=[ast.Constant(value=None)]) if name in absent:
            return isinstance(operator, ast.Is)
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), _]) if name in absent:
            return False
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get"), args=[_]) if name in empty:
            return False
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _truth(operand, absent, empty)
            return None if truth is None else not truth
        case ast.BoolOp(op=operator, values=parts):
            decides = isinstance(operator, ast.Or)
            truths = {_truth(part, absent, empty) for part in parts}
            return decides if decides in truths else None if None in truths else not decides
    return None


def is_harmless(test: ast.expr, known: Collection[str] = ()) -> bool:
    """Return whether each operand of a condition is one that was read, or is fixed."""
    match test:
        case ast.BoolOp(values=parts):
            return all(is_harmless(part, known) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return is_harmless(operand, known)
        case ast.Compare(left=left, comparators=[ast.Constant()]) if ast.unparse(left) in _COMPARED:
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get")):
            return True
    return is_fixed(test, known) or ast.unparse(test) in _HARMLESS


def is_fixed(test: ast.expr, known: Collection[str] = ()) -> bool:
    """Return whether a condition is decided by the config, by train mode, or by which arguments are given.

    ``known``: local names of which that is so.
    """
    match test:
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return all(is_fixed(part, known) for part in parts)
        case ast.UnaryOp(operand=operand):
            return is_fixed(operand, known)
        case ast.BinOp(left=left, right=right):
            return is_fixed(left, known) and is_fixed(right, known)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return (all(isinstance(one, (ast.Is, ast.IsNot)) for one in ops)
                    or all(is_fixed(part, known) for part in (left, *comparators)))
        case ast.Call(func=func):
            name = ast.unparse(func)
            return name in _FIXED_CALLS or name.startswith(("is_", "logger."))
        case ast.Constant():
            return True
        case ast.Name(id=name) if name in known:
            return True
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return _is_fixed_name(ast.unparse(test))
    return False


def _is_fixed_name(text: str) -> bool:
    root = text.split(".")[0].split("[")[0]
    if root == "self":
        return not any(word in text for word in (".shape", ".size"))
    return root == "config" or (root in _ARGUMENTS and "." not in text and "[" not in text)
