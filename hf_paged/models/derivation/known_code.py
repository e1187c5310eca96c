# mypy: disallow-untyped-defs=False
"""Modules whose own code is known, computed by one kernel in place of several launches: norms, gated MLPs and RoPE.

A class has no name here. Most classes of transformers repeat the code of a few: a module is taken if its class's
function has the instructions of one below. Eligibility has checked that the model's code is what it was imported with,
and that its modules have no hooks.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from hf_paged.guards.families import SILU
from hf_paged.kernels._triton import why_not_on
from hf_paged.kernels.layer.rms_norm import USUAL_FORM, NormForm, rms_norm
from hf_paged.kernels.layer.rotary import rotary
from hf_paged.kernels.layer.silu_mul import silu_mul_parts
from hf_paged.models.executor import ModelExecutor, OnView

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# -- code of transformers -----------------------------------------------------------------------------------------


def _llama_norm(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _gpt_oss_norm(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _gemma_norm(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _gemma_inner(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _gated_mlp(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _whole_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def _part_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return q_embed, k_embed


# By function: how it rounds, and the attribute that has its epsilon.
_NORMS = ((_llama_norm, USUAL_FORM, "variance_epsilon"), (_gpt_oss_norm, NormForm(rounds_first=False),
                                                          "variance_epsilon"),
          (_gemma_norm, NormForm(rounds_first=False, adds_one=True), "eps"))


def is_same_code(found: Any, known: Callable[..., Any]) -> bool:
    """Return whether a function runs the instructions of another, on the same names, constants and defaults."""
    return type(found) is FunctionType and _code_of(found) == _code_of(known)


def _code_of(function: Any) -> tuple:
    return _steps(function.__code__), function.__code__.co_argcount, function.__defaults__


@lru_cache(maxsize=256)
def _steps(code: CodeType) -> list[tuple[str, str]]:
    return [(step.opname, step.argrepr) for step in dis.get_instructions(code)]


# -- what kernels compute -----------------------------------------------------------------------------------------


class KnownCode:
    """The forwards of an executor's modules by kernels, by path below the decoder.

    Without autocast, on a GPU; ``is_wanted``: whether there are any.
    """

    def __init__(self, executor: ModelExecutor, *, is_wanted: bool) -> None:
        self._executor, self._is_wanted = executor, is_wanted
        self._found: tuple[Any, dict[str, Any]] = None, {}

    def forwards(self) -> dict[str, Any]:
        """Return the forwards for the model as it is now."""
        executor = self._executor
        device = executor.model.device
        if not self._is_wanted or executor.autocast is not None or why_not_on(device) is not None:
            return {}
        structure = executor.watch.step_structure(executor.model)
        if self._found[0] != structure:
            called = {id(module) for _, module in executor.called_modules()}
            unseen = tuple(f"{path}." for path in executor.left_out())
            found = {path: forward for path, module in executor.decoder.named_modules()
                     if path and id(module) not in called and not path.startswith(unseen)
                     for forward in _forwards_of(module)}
            self._found = structure, found
        return self._found[1]

    def drop_references(self) -> None:
        """Keep no module alive until the next step."""
        self._found = None, {}


def _forwards_of(module: nn.Module) -> Iterator[Any]:
    """Yield the forward of a module by kernels, if there is one."""
    forward: Any = type(module).forward
    if "forward" in vars(module):  # a kernel of the Hub
        return
    for known, form, eps in _NORMS:
        inner = known is not _gemma_norm or is_same_code(getattr(type(module), "_norm", None), _gemma_inner)
        if inner and is_same_code(forward, known):
            yield partial(_norm, module, form, eps)
    if is_same_code(forward, _gated_mlp) and type(module.act_fn) in SILU and (
            "forward" not in vars(module.act_fn)):
        yield OnView(_gated)
    if (name := _rotary_name(forward)) is not None:
        yield OnView(_with_rotary(forward, name))


def _norm(module: Any, form: NormForm, eps: str, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    weight, (x,) = module.weight, (*args, *named.values())
    fits = x.dtype in _DTYPES and weight.dtype in _DTYPES and (weight.dtype == x.dtype or not form.rounds_first)
    is_plain = type(weight) is nn.Parameter and weight.shape == x.shape[-1:] and weight.is_contiguous()
    if not (fits and is_plain) or x.stride(-1) != 1:
        result: torch.Tensor = type(module).forward(module, x)
        return result
    return rms_norm(x, weight, getattr(module, eps), form)


def _gated(self: Any, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    x, = (*args, *named.values())
    gate, up = self.gate_proj(x), self.up_proj(x)
    fits = gate.dtype == up.dtype and gate.dtype in _DTYPES and gate.shape == up.shape
    if fits and gate.stride(-1) == up.stride(-1) == 1:
        product = silu_mul_parts(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)
    else:
        product = self.act_fn(gate) * up
    result: torch.Tensor = self.down_proj(product)
    return result


def _rotary_name(forward: Any) -> str | None:
    """Return the name by which a forward calls RoPE of known code, or None."""
    inner = getattr(forward, "__wrapped__", forward)
    if type(inner) is not FunctionType or hasattr(inner, "__wrapped__"):
        return None
    for name in inner.__code__.co_names:
        found: Any = inner.__globals__.get(name)
        if is_same_code(found, _whole_rotary) or is_same_code(found, _part_rotary):
            return name if is_same_code(found.__globals__.get("rotate_half"), rotate_half) else None
    return None


def _with_rotary(forward: Any, name: str) -> Callable[..., Any]:
    """Return a copy of a forward, decorated or not, which calls `rotary` by a name."""
    inner = getattr(forward, "__wrapped__", forward)
    own = inner.__globals__[name]
    copy = FunctionType(inner.__code__, {**inner.__globals__, name: partial(_rotary, own)}, inner.__name__,
                        inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    if inner is forward:
        return copy
    cells = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in forward.__closure__)
    return FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)


def _rotary(own: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
            unsqueeze_dim: int = 1) -> Any:
    """Compute RoPE by `rotary`, or by the model's own function what it does not take."""
    tensors = (q, k, cos, sin)
    fits = unsqueeze_dim == 1 and [x.dim() for x in tensors] == [4, 4, 3, 3] and q.dtype in _DTYPES and (
        len({x.dtype for x in tensors}) == 1 and q.stride(-1) == k.stride(-1) == 1)
    if not fits or (q.shape[0], q.shape[2:]) != (k.shape[0], k.shape[2:]) or not (
            cos.shape == sin.shape == (q.shape[0], q.shape[2], cos.shape[-1]) and cos.shape[-1] <= q.shape[-1]):
        return own(q, k, cos, sin, unsqueeze_dim)
    return rotary(q, k, cos, sin)
