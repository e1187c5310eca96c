"""Blocks of experts by hf_paged's kernels: what they read of a block, and why a block's own modules run instead.

The numbers are those of transformers' `batched_mm` and `grouped_mm`, with their roundings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations import moe

from hf_paged.guards.expert_code import GATES, ROUTERS, ignores_logits, known_code
from hf_paged.guards.families import SILU
from hf_paged.guards.hooks import ReplayHook, only_captures
from hf_paged.kernels._triton import why_not_on
from hf_paged.kernels.experts.down import down
from hf_paged.kernels.experts.fold import ExpertUpdate
from hf_paged.kernels.experts.gate_up import ExpertWeights, Gating, gate_up
from hf_paged.kernels.experts.join import ExpertOutputs, join_experts
from hf_paged.kernels.experts.route import (
    MAX_EXPERTS,
    MAX_ROWS,
    SIGMOID,
    SOFTMAX,
    TOPK_SOFTMAX,
    RouterRule,
    RouterWeights,
    Routes,
    new_arrivals,
    route,
)
from hf_paged.models.executor import ModelExecutor, view_of
from hf_paged.models.expert_lora.folding import folded_forward, wrappers_of
from hf_paged.models.expert_lora.updates import updates_of
from hf_paged.models.layer_ops import apply_module
from hf_paged.models.routing.record import recording
from hf_paged.models.tuners import inside_wrappers, wraps_experts
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import ShardedExperts

logger = logging.getLogger(__name__)

_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
# Attributes of experts; transformers 5.17 has none of the kinds that later versions name by the last two.
_EXPECTED = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
_MULTIPLE = 16  # of the sizes: rows of weights begin at multiples of 16 bytes
_CORRECTION = "e_score_correction_bias"

# By the name of the function in `expert_code.ROUTERS` that a router's forward is: what it reads of the router.
_RULES: dict[str, Callable[[Any], RouterRule]] = {
    "softmax": lambda router: RouterRule(SOFTMAX, router.top_k, norm=router.norm_topk_prob),
    "normed_softmax": lambda router: RouterRule(SOFTMAX, router.top_k, norm=True),
    "float32_softmax": lambda router: RouterRule(SOFTMAX, router.top_k, norm=True, keeps_float32=True),
    "topk_softmax": lambda router: RouterRule(TOPK_SOFTMAX, router.top_k),
    "float32_topk_softmax": lambda router: RouterRule(TOPK_SOFTMAX, router.top_k),
    "sigmoid": lambda router: RouterRule(SIGMOID, router.top_k, norm=True),
    "sigmoid_in_groups": lambda router: RouterRule(
        SIGMOID, router.top_k, norm=router.norm_topk_prob, exact_logits=True, epsilon=1e-20,
        scaling=router.routed_scaling_factor, num_groups=router.num_group, topk_group=router.topk_group),
}


class ExpertsParts(NamedTuple):
    """What steps read of a block of experts.

    Attributes:
        router, rule: weights of the router, and how it chooses.
        gate_up, down, gating: weights of the experts, or this rank's slices of I, and how gates and ups become one.
        ranks: over which the block's output is summed; `SINGLE` if there are no others.
        arrivals: counters of the router's kernel, which no two launches at the same time share.
    """

    router: RouterWeights
    rule: RouterRule
    gate_up: ExpertWeights
    down: ExpertWeights
    gating: Gating
    ranks: ParallelGroup
    arrivals: torch.Tensor

    def is_same(self, other: Any) -> bool:
        """Return whether a step computes the same with both."""
        if not isinstance(other, ExpertsParts) or (self.rule, self.gating) != (other.rule, other.gating):
            return False
        mine, others = ((*one.router, *_flat(one.gate_up), *_flat(one.down), one.ranks, one.arrivals)
                        for one in (self, other))
        return len(mine) == len(others) and all(a is b or (type(a) is float and a == b)
                                                for a, b in zip(mine, others, strict=True))

    def routes(self, hidden: torch.Tensor, lengths: torch.Tensor | None) -> Routes:
        """Choose experts for each row; ``lengths`` [T] int32: 0 for padding rows, which get none; None: there are none.
        """
        return route(hidden, self.router, self.rule, self.arrivals, lengths)

    def products(self, hidden: torch.Tensor, routes: Routes) -> ExpertOutputs:
        """Return the products of each row's experts."""
        inner = gate_up(hidden, self.gate_up, routes, self.gating)
        return ExpertOutputs(down(inner, self.down, routes), routes)

    def outputs(self, hidden: torch.Tensor, lengths: torch.Tensor | None) -> ExpertOutputs | None:
        """Return `products` by `routes`; None for more rows than the router's kernel takes."""
        return None if len(hidden) > MAX_ROWS else self.products(hidden, self.routes(hidden, lengths))


def apply_experts(block: nn.Module, parts: ExpertsParts | None, hidden: torch.Tensor, lengths: torch.Tensor | None,
                  record: Callable[[torch.Tensor], None] | None = None,
                  ) -> tuple[torch.Tensor | ExpertOutputs, ParallelGroup]:
    """Compute a block of experts on hidden [T, H]: [T, H], or products that are not added up yet.

    ``record`` takes the experts [T, k] of each token. Returns the ranks over which the result still has to be summed as
    well.
    """
    outputs = None if parts is None else parts.outputs(hidden, lengths)
    if parts is None or outputs is None:
        forwards: dict[str, Callable[..., Any]] = {}
        if wraps_experts(experts := block._modules["experts"]):
            forwards["experts"] = folded_forward(experts)
        if record is not None:
            forwards[_router_name(block)] = recording(_router_of(block), record)
        return apply_module(view_of(block, forwards) if forwards else block, hidden), SINGLE
    if record is not None:
        record(outputs.routes.experts)
    return (join_experts(outputs), parts.ranks) if parts.ranks.is_parallel else (outputs, SINGLE)


class ExpertsReader:
    """Reads the blocks of experts of an executor's model, and logs why a block's own modules run.

    ``is_alone``: a block has to be a router and experts and nothing else.
    """

    def __init__(self, executor: ModelExecutor, *, is_wanted: bool, is_alone: bool = True) -> None:
        self._executor, self._is_wanted, self._is_alone = executor, is_wanted, is_alone
        self._arrivals: torch.Tensor | None = None  # of `ExpertsParts`
        self._why: str | None = None  # what the log says last

    def parts(self, block: nn.Module) -> ExpertsParts | None:
        """Return the parts of a block; None for one that is called as it stands."""
        found = self.read(block, self._executor.kv_spec().device)
        if not isinstance(found, str):
            return found
        if found != self._why:
            logger.info("hf_paged: experts run by transformers' modules: %s", found)
        self._why = found
        return None

    def read(self, block: nn.Module, device: torch.device) -> ExpertsParts | str:
        """Return the parts of a block for a device, or why its own modules would run there."""
        if not self._is_wanted:
            return "fused_experts=False"
        spec = self._executor.kv_spec()
        if self._arrivals is None or self._arrivals.device != spec.device:
            self._arrivals = new_arrivals(spec.device)
        return why_not_on(device) or read_experts(block, self._executor.config._experts_implementation,
                                                  spec.compute_dtype, self._arrivals, is_alone=self._is_alone)


class ExpertForwards:
    """Forwards that run in place of those of routers and experts in a model whose modules run as they stand.

    A block's own forward calls both, and adds what else it has (shared experts).
    """

    def __init__(self, executor: ModelExecutor, *, is_wanted: bool) -> None:
        self._executor = executor
        self._reader = ExpertsReader(executor, is_wanted=is_wanted, is_alone=False)
        self._made_for: tuple[int, int] | None = None  # structure and places of the model (`ModelWatch`)
        self._parts: dict[str, ExpertsParts] = {}  # by path of the block below the decoder

    def prepare(self) -> None:
        """Look up the blocks of the model as it is now."""
        watch, model = self._executor.watch, self._executor.model
        if (now := (watch.structure(model), watch.places(model))) != self._made_for:
            found = ((path, self._reader.parts(block)) for path, block in self._blocks())
            self._parts = {path: parts for path, parts in found if parts is not None}
            self._made_for = now

    def drop_references(self) -> None:
        """Release parameters until `prepare`."""
        self._parts, self._made_for = {}, None

    def why_not(self, device: torch.device) -> str | None:
        """Return why a block would run by its own modules on a device; None if there is no block, too."""
        found = (self._reader.read(block, device) for _, block in self._blocks())
        return next((why for why in found if isinstance(why, str)), None)

    def of_step(self, num_tokens: int, lengths: torch.Tensor | None) -> dict[str, Callable[..., Any]]:
        """Return the forwards of a step, by path below the decoder; ``lengths``: as in `ExpertsParts.routes`."""
        forwards: dict[str, Callable[..., Any]] = {}
        if num_tokens > MAX_ROWS:
            return forwards
        decoder: nn.Module = self._executor.decoder
        for path, parts in self._parts.items():
            block = decoder.get_submodule(path)
            # A caller's code runs between steps, and may have exchanged weights or registered hooks.
            current = _current(block, parts) or self._reader.parts(block)
            if current is not None:
                found = _Forwards(_router_of(block), block._modules["experts"], current, lengths)
                forwards[f"{path}.{_router_name(block)}".lstrip(".")] = found.route
                forwards[f"{path}.experts".lstrip(".")] = found.run
        return forwards

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        modules = self._executor.decoder.named_modules()
        return ((path, module) for path, module in modules if module._modules.get("experts") is not None)


class _Forwards:
    """Forwards of a router and its experts in one step."""

    def __init__(self, router: Any, experts: Any, parts: ExpertsParts, lengths: torch.Tensor | None) -> None:
        self._router, self._experts, self._parts, self._lengths = router, experts, parts, lengths
        self._routes: Routes | None = None

    def route(self, hidden: torch.Tensor, *args: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Return (None in place of logits, scores, experts)."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if rows.dtype != self._parts.router.weight.dtype:
            found: tuple[Any, torch.Tensor, torch.Tensor] = self._router.forward(hidden, *args)
            return found
        lengths = self._lengths
        if lengths is not None and len(lengths) != len(rows):
            lengths = None
        self._routes = self._parts.routes(rows, lengths)
        return None, self._routes.scores, self._routes.experts

    def run(self, hidden: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Compute the experts; those that were given others than `route` returned by their module."""
        routes = self._routes
        if routes is None or experts is not routes.experts or scores is not routes.scores:
            found: torch.Tensor = folded_forward(self._experts)(hidden, experts.clamp(min=0).long(), scores)
            return found
        return self._parts.ranks.all_reduce(join_experts(self._parts.products(hidden, routes)))


def read_experts(block: nn.Module, implementation: str | None, dtype: torch.dtype, arrivals: torch.Tensor, *,
                 is_alone: bool = True) -> ExpertsParts | str:
    """Return the parts of a block of experts, or why its own modules have to run.

    Args:
        block: a module with `experts` and a router, of a class of transformers, whose code eligibility has checked.
        implementation: implementation of experts in the config.
        dtype: dtype of hidden states.
        arrivals: see `new_arrivals`.
        is_alone: whether the block may have no other modules.
    """
    if implementation not in _IMPLEMENTATIONS:
        return f"the config names the implementation {implementation!r} of experts"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"hidden states are {dtype}, and the kernels take float16 and bfloat16"
    router, outermost = _router_of(block), block._modules["experts"]
    experts, updates = inside_wrappers(outermost), updates_of(outermost)
    name = known_code(getattr(type(router), "forward", None), ROUTERS)
    if name is None:
        return f"the router is a {type(router).__name__}, whose code is not known"
    if not hasattr(type(experts), "_apply_gate"):
        return f"the experts are a {type(experts).__name__}"
    if is_alone and len(list(block.children())) > 2:
        return "the block of experts has other modules than a router and experts"
    if not is_alone and not ignores_logits(type(block)):
        return f"a {type(block).__name__} may read more of its router than experts and scores"
    if not all(map(_is_untouched, (block, router, *wrappers_of(outermost), experts))):
        return "the block of experts has hooks"
    if isinstance(updates, str):
        return updates
    rule, gating = _RULES[name](router), _gating(experts)
    if gating is None:
        return "experts have another activation than silu(gate) * up or gpt-oss'"
    found = next(_unlike(block, router, experts, rule, dtype), None)
    return f"experts have {found}" if found is not None else _parts(block, router, experts, updates, rule, gating,
                                                                    arrivals)


def _router_name(block: nn.Module) -> str:
    return "gate" if block._modules.get("gate") is not None else "router"


def _router_of(block: nn.Module) -> Any:
    return block._modules.get(_router_name(block))


def _is_untouched(module: nn.Module) -> bool:
    hooks = module._forward_hooks.values()
    inert = all(only_captures(hook) or type(hook) is ReplayHook for hook in hooks)
    return inert and not module._forward_pre_hooks and "forward" not in vars(module)


def _gating(experts: Any) -> Gating | None:
    """Return how experts make one number of a gate and an up; None if that is not known."""
    gate, is_interleaved = getattr(type(experts), "_apply_gate", None), not getattr(experts, "is_concatenated", True)
    if gate is moe._default_apply_gate and isinstance(experts.act_fn, SILU) and not is_interleaved:
        return Gating()
    if known_code(gate, GATES) is not None and is_interleaved:
        return Gating(True, float(experts.limit), float(experts.alpha))
    return None


def _parts(block: nn.Module, router: Any, experts: Any, updates: dict[str, ExpertUpdate], rule: RouterRule,
           gating: Gating, arrivals: torch.Tensor) -> ExpertsParts:
    def weights(name: str) -> ExpertWeights:
        return ExpertWeights(getattr(experts, name), getattr(experts, f"{name}_bias", None), experts.is_transposed,
                             updates.get(name))

    ranks = experts.group if isinstance(experts, ShardedExperts) and experts.group.is_parallel else SINGLE
    return ExpertsParts(
        RouterWeights(router.weight, getattr(router, "bias", None), _correction(block, router)), rule,
        weights("gate_up_proj"), weights("down_proj"), gating, ranks, arrivals)


def _flat(weights: ExpertWeights) -> tuple[Any, ...]:
    return (*weights[:-1], *(weights.update or (None,)))


def _correction(block: nn.Module, router: nn.Module) -> torch.Tensor | None:
    return router._buffers.get(_CORRECTION, block._buffers.get(_CORRECTION))


def _current(block: nn.Module, parts: ExpertsParts) -> ExpertsParts | None:
    """Return the parts if the block still has their weights, and no hooks."""
    router, outermost = _router_of(block), block._modules["experts"]
    experts = inside_wrappers(outermost)
    if router is None or experts is None or not all(
            map(_is_untouched, (block, router, *wrappers_of(outermost), experts))):
        return None
    held = {**router._parameters, **experts._parameters}
    return parts if all(held.get(name) is tensor for name, tensor in _named(parts)) and (
        _correction(block, router) is parts.router.correction) and _are_same(updates_of(outermost), parts) else None


def _are_same(updates: dict[str, ExpertUpdate] | str, parts: ExpertsParts) -> bool:
    """Return whether the updates of experts' weights are those of parts."""
    if isinstance(updates, str):
        return False
    pairs = [(updates.get(name), weights.update) for name, weights in (
        ("gate_up_proj", parts.gate_up), ("down_proj", parts.down))]
    return all(a is b or (a is not None and b is not None and a.a is b.a and a.b is b.b and a.scale == b.scale)
               for a, b in pairs)


def _named(parts: ExpertsParts) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the parameters of parts by the names that routers and experts have for them."""
    yield from (("weight", parts.router.weight), ("bias", parts.router.bias))
    for name, weights in (("gate_up_proj", parts.gate_up), ("down_proj", parts.down)):
        yield from ((name, weights.weight), (f"{name}_bias", weights.bias))


def _unlike(block: nn.Module, router: Any, experts: Any, rule: RouterRule, dtype: torch.dtype) -> Iterator[str]:
    """Yield what the kernels do not take of a router and its experts."""
    for name, value in _EXPECTED.items():
        if getattr(experts, name, False) is not value:
            yield f"{name}={getattr(experts, name, False)!r}"
    projections = {"gate_up_proj", "down_proj"}
    if experts.has_bias:
        projections |= {f"{name}_bias" for name in projections}
    if set(experts._parameters) != projections:
        yield f"other parameters than {' and '.join(sorted(projections))}"
        return
    for name, weight in (*router._parameters.items(), *experts._parameters.items()):
        if type(weight) is not nn.Parameter or weight.dtype != dtype or not weight.is_contiguous():
            yield f"in {name} no plain contiguous parameter of {dtype}"
    correction = _correction(block, router)
    if rule.kind == SIGMOID and (correction is None or correction.dtype not in (torch.float32, dtype)):
        yield f"in {_CORRECTION} no buffer of float32 or {dtype}"
    num_experts, width = router.weight.shape
    found = [ExpertWeights(weight, None, experts.is_transposed) for weight in (experts.gate_up_proj, experts.down_proj)]
    inner = found[1].sizes[1]
    if [len(one.weight) for one in found] != [num_experts] * 2 or [one.sizes for one in found] != [
            (2 * inner, width), (width, inner)]:
        yield f"weights {' and '.join(str(list(one.weight.shape)) for one in found)}"
    if num_experts > MAX_EXPERTS or rule.top_k > num_experts or num_experts % rule.num_groups:
        yield f"a router that chooses {rule.top_k} of {num_experts}"
    if width % _MULTIPLE or inner % _MULTIPLE:
        yield f"sizes {width} and {inner}, of which one is no multiple of {_MULTIPLE}"
