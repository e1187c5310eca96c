"""Executor of Qwen3, Qwen3-MoE and Llama: layers on packed tokens with merged projections, fused ops and pages.

Follows `Qwen3Model.forward`, `Qwen3DecoderLayer.forward` and `Qwen3Attention.forward` of transformers 5.17 to 5.24 and
their like in the other families, rounding included. A projection that is not a plain layer (LoRA, quantized) is called
as it stands, and so is a block of experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_paged.device.adjacent import AdjacentMemory, adjacent_memory
from hf_paged.errors import Reason
from hf_paged.guards.activations import SILU
from hf_paged.guards.families import Family
from hf_paged.guards.hints import DISAGREE
from hf_paged.guards.module_snapshot import ModuleSnapshot
from hf_paged.guards.snapshot import tensors_inside
from hf_paged.kernels.attention.types import AttentionOptions
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.hopper import decoder_layers_support
from hf_paged.kernels.layer.heads_to_cache import HeadsToCache
from hf_paged.kernels.layer.linear import makes_parts
from hf_paged.kernels.lora.lora_expand import Delta, lora_expand_unchecked
from hf_paged.kernels.lora.lora_qk_norm_rope_store import lora_qk_norm_rope_store_unchecked
from hf_paged.models.base import KVSpec, ModelReadings, StepContext
from hf_paged.models.copied_weights import CopiedLinears, CopiedWeights, copied_bytes
from hf_paged.models.decoder import DecoderExecutor, plain_values
from hf_paged.models.keep_alive import keep_alive
from hf_paged.models.layer_ops import FUSED
from hf_paged.models.linear_groups import LinearGroups
from hf_paged.models.lora import Adapters, is_loaded, reads_tables
from hf_paged.models.lora_rows import AdapterRows, apply_layer
from hf_paged.models.merged import MergedWeight, merge, places
from hf_paged.models.one_launch import OneLaunch, Rows, decoder_of, why_not
from hf_paged.models.plain_linear import (
    RowProduct,
    all_columns,
    apply_head,
    apply_module,
    is_plain_linear,
)
from hf_paged.models.projections import Projections
from hf_paged.models.rope import RopeTable
from hf_paged.models.weight_shapes import check_weights
from hf_paged.parallel.group import SINGLE, ParallelGroup

logger = logging.getLogger(__name__)

QKV = ("q_proj", "k_proj", "v_proj")
QKV_GROUP = ".qkv"  # ends the name of a layer's group of q, k, v
GATE_UP = ("gate_proj", "up_proj")
HEAD = "lm_head"


class LayerParts(NamedTuple):
    """Parts of a layer that a step uses besides merged projections."""

    input_norm: Any
    head_norms: tuple[Any, Any] | None  # of query and key heads
    options: AttentionOptions
    o_proj: RowProduct | CopiedLinears
    post_norm: Any
    mlp: Any
    has_silu: bool
    down_proj: RowProduct | CopiedLinears | None  # None: a block of experts
    o_linear: Callable[..., torch.Tensor]  # both compute a projection's product, or its parts for a norm to sum
    down_linear: Callable[..., torch.Tensor]


class FusedExecutor(DecoderExecutor):
    """Executor that runs the layers of one family by its own code, on `MergedWeight` and with `LayerOps`.

    Under autocast a dense model of plain linear layers runs so with `CopiedWeights`; any other model (quantized
    layers, experts) runs by its own modules.
    """

    def __init__(self, model: PreTrainedModel, *, family: Family, **techniques: bool) -> None:
        super().__init__(model, family=family, **techniques)
        self._has_head_norms = "q_norm" in family.parts
        self._rope = RopeTable()
        # The state of the modules whose weights passed the checks, and the dtype to which calls cast then.
        self._checked: tuple[ModelReadings, torch.dtype | None] | None = None
        self._copied: CopiedWeights | None = None
        self._groups: LinearGroups | None = None
        self._runs_modules = False  # whether modules run as they stand, under autocast
        self._memory: AdjacentMemory | None = None
        self._merged: dict[str, MergedWeight] = {}
        self._held: list[torch.Tensor] = []  # keeps what merged tensors read if a parameter is re-pointed
        self._qkv: list[Projections] = []
        self._gate_up: list[Projections | None] = []  # None: a block of experts
        self._parts_of_layers: list[LayerParts] = []
        self._parts_copies: dict[str, CopiedLinears] | None = None  # that the parts compute with
        # What the parts belong to: modules, the look at them, and the places of linear layers' weights.
        self._untouched: ModuleSnapshot | None = None
        self._parts_look: tuple[ModelReadings, torch.dtype | None] | None = None
        self._parts_merged: dict[str, MergedWeight] = {}
        self._plain_linears: list[nn.Module] = []  # none if nothing is merged
        self._places: list[list] = []
        self._adapters: Adapters | None = None  # None: not read yet
        self._joins = False  # whether the next kernel may sum the parts of a product of few rows
        self._one_launch: OneLaunch | None = None  # None: its kernel does not support the layers

    def prepare(self, max_model_len: int) -> None:
        spec, look = self.kv_spec(), self.look()
        is_same = self._parts_look == (look, self.autocast) and self._is_untouched()
        if not is_same or self._adapters is None or self._adapters:
            self._look_up_adapters(look)
        self._prepare_copies()
        if self._runs_modules:
            return
        self._check_weights(spec, look)
        self._rope.update(self.model.model.rotary_emb, max_model_len, spec.compute_dtype, spec.device)
        is_same = is_same and self._parts_copies is self._copies() and self._places == self._places_now()
        if self._merge_weights and not (is_same and self._are_all_merged()):
            self._merge(spec.device)
        is_same = is_same and self._parts_merged == self._merged
        if not is_same or self._adapters:
            self._look_up_parts()
            self._parts_look = look, self.autocast  # last: after an interrupt all is looked up again
        self._held = keep_alive([weight for merged in self._merged.values() for weight in merged.weights], self._held)
        if self._one_launch is not None:
            self._one_launch.look_again()

    def _check_weights(self, spec: KVSpec, look: ModelReadings) -> None:
        """Check shapes once for every state of the modules, since kernels do not check them in every step."""
        cast = self.autocast
        if self._checked is None or self._checked[0] is not look or self._checked[1] != cast:
            heads = self.model.config.num_attention_heads // self.group.size
            dtype = spec.compute_dtype if cast is None else None
            check_weights(self.model, self._layers(), spec, heads, dtype)
            self._checked = look, cast

    def _prepare_copies(self) -> None:
        """Make or drop copies as the running calls need them; `refresh` fills them."""
        self._runs_modules = self.autocast is not None and not self._can_cast_by_copies()
        if self.autocast is None or self._runs_modules:
            self._drop_copies()
            self._groups = None if self.autocast is None else self._groups  # groups keep replaced layers alive
            return
        groups = self._all_groups()
        if self._copied is None or not self._copied.fit(groups, self.autocast):
            self._drop_copies()  # first: memory may not hold both
            self._copied = CopiedWeights(groups, self.autocast)
        self._copied.restore()

    def _drop_copies(self) -> None:
        if self._copied is not None:
            self._copied = self._parts_copies = self._parts_look = None
            self._qkv, self._gate_up, self._parts_of_layers = [], [], []  # these hold copies as well

    def _can_cast_by_copies(self) -> bool:
        """Return whether autocast would cast nothing but plain linear layers."""
        if type(self.model.model.embed_tokens) is not nn.Embedding:
            return False
        if any(_has_experts(layer.mlp) or not isinstance(layer.mlp.act_fn, SILU) for layer in self._layers()):
            return False
        return self._all_groups().can_be_copied()

    def _all_groups(self) -> LinearGroups:
        """Return all linear layers of a dense model whose products are computed, grouped by input."""
        if self._adapters is None:
            self._look_up_adapters(self.look())
        model, adapters = self.model, self._adapters
        others = model._modules, adapters, self.config.num_hidden_layers
        if self._groups is None or not self._groups.hold(others):
            layers, found = self._layers(), dict[str, tuple[Any, ...]]()
            for i, layer in enumerate(layers):
                found |= {key: self._bases(linears) for key, linears in _all_groups(i, layer).items()}
            blocks = [block for layer in layers for block in (layer, layer.self_attn, layer.mlp)]
            self._groups = LinearGroups(found | {HEAD: (model.lm_head,)},
                                        [model, model.model, model.model.layers, *blocks], others)
        return self._groups

    def _copies(self) -> dict[str, CopiedLinears] | None:
        """Return the copies by name; another dict whenever the copies are other tensors."""
        return None if self._copied is None else self._copied.by_name

    def refresh(self, checksum: torch.Tensor | None) -> None:
        if self._copied is not None:
            self._copied.refresh(self._all_groups(), checksum)

    def copies_are_stale(self) -> bool:
        if self._runs_modules or self._copied is None:
            return False
        return self._copied.are_stale(self._all_groups())

    @property
    def has_copies(self) -> bool:
        return self._copied is not None and bool(self._copied.by_name)

    @property
    def copied_bytes(self) -> int:
        return 0 if self._copied is None else self._copied.nbytes

    def bytes_to_come(self) -> int:
        is_here = self._copied is not None and self._copied.is_here
        if self.autocast is None or is_here or not self._can_cast_by_copies():
            return 0
        return copied_bytes(self._all_groups(), self.autocast)

    def own_tensors(self) -> list[torch.Tensor]:
        copies = [] if self._copied is None else self._copied.tensors()
        return copies if self._adapters is None else [*copies, *self._adapters.tensors()]

    def _look_up_adapters(self, look: ModelReadings) -> None:
        """Read the adapters of LoRA layers; keeps what was read before if the layers are unchanged."""
        read, groups = (look, self._row_names, self.autocast), self._groups_with_adapters()
        if self._adapters is not None and self._adapters.hold(groups, *read):
            return
        found = Adapters(groups, *read)
        if self._adapters is not None and found.key == self._adapters.key:
            found.take_over(self._adapters)
        else:
            found.load(self.kv_spec().device)
        self._adapters = found

    def _groups_with_adapters(self) -> list[tuple[nn.Module, ...]]:
        """Return layers, grouped by input, whose LoRA kernels may apply; none if PEFT's layers run as they stand."""
        groups: list[tuple[nn.Module, ...]] = []
        by_tables = is_loaded() and self._ops is FUSED and not self.group.is_parallel
        if by_tables and reads_tables(self.kv_spec().device):
            for i, layer in enumerate(self._layers()):
                groups += _all_groups(i, layer).values()
        return groups

    def is_current(self) -> bool:
        if self._adapters:
            read = self.look(), self._row_names, self.autocast
            if not self._adapters.hold(self._groups_with_adapters(), *read):
                return False
        if self.autocast is not None:
            if self._runs_modules == self._can_cast_by_copies():
                return False
            if self._runs_modules:
                return True
            if self._copied is None or not self._copied.fit(self._all_groups(), self.autocast):
                return False
        held = self._projections_held()
        found = [projections for group in self._collect() for projections in group if projections]
        same = all(a.linears == b.linears and a.weight is b.weight and a.are_plain == b.are_plain
                   for a, b in zip(held, found, strict=False))
        same = same and len(held) == len(found) and self._parts_of_layers == self._collect_parts()
        return same and self._rope.is_made_from(self.model.model.rotary_emb)

    def drop_references(self) -> None:
        self._qkv, self._gate_up, self._parts_of_layers, self._parts_copies = [], [], [], None
        self._untouched, self._parts_look, self._plain_linears, self._places = None, None, [], []
        self._merged, self._parts_merged, self._held, self._groups = {}, {}, [], None
        if self._one_launch is not None:
            self._one_launch.drop_references()
        if self._copied is not None and not self._copied.unmap():
            self._copied = None

    def release(self) -> None:
        self.drop_references()
        self._rope, self._memory, self._checked = RopeTable(), None, None
        self._copied, self._adapters, self._one_launch = None, None, None

    def may_use_one_launch(self, rows: int, lengths: np.ndarray) -> bool:
        return self._one_launch is not None and decoder_layers_support.pays_off(rows, lengths)

    def uses_one_launch(self, rows: int) -> bool:
        return self._one_launch is not None and self._one_launch.is_ready(rows)

    def captured_tensors(self) -> list[torch.Tensor]:
        return [] if self._one_launch is None else self._one_launch.captured_tensors()

    def _is_untouched(self) -> bool:
        return self._untouched is not None and self._untouched.holds(self.model.model)

    def _places_now(self) -> list[list]:
        """Return ids and places of the weights of plain linear layers, without keeping the weights alive."""
        weights: list[torch.Tensor] = [vars(linear)["_parameters"]["weight"] for linear in self._plain_linears]
        return [list(map(id, weights)), *places(weights)]

    def _are_all_merged(self) -> bool:
        """Return whether all groups of layers have a merged weight or a copy."""
        return all(one.weight is not None for one in self._projections_held())

    def _projections_held(self) -> list[Projections]:
        return [*self._qkv, *filter(None, self._gate_up)]

    def _look_up_parts(self) -> None:
        untouched = ModuleSnapshot(self.model.model)
        whole = self.autocast is None and not self.group.is_parallel
        self._joins = whole and makes_parts(self.kv_spec().device)
        groups = [of for i, layer in enumerate(self._layers()) for of in _groups(i, layer).values()]
        plain = [linear for of in groups for linear in self._bases(of) if is_plain_linear(linear)]
        self._plain_linears = plain if self._merged else []
        self._places = self._places_now()  # first, so that later changes are noticed
        self._qkv, self._gate_up = self._collect()
        self._parts_of_layers = self._collect_parts()
        self._parts_copies, self._parts_merged = self._copies(), dict(self._merged)
        device = self.kv_spec().device
        if not self._may_run_at_once(whole):
            self._one_launch = None
        elif self._one_launch is None or self._one_launch.device != device:
            self._one_launch = OneLaunch(device)
        self._untouched = untouched  # last: after an interrupt all is looked up again

    def _may_run_at_once(self, whole: bool) -> bool:
        """Return whether one launch may run all layers; `whole`: one device computes in the model's own dtype."""
        if not (whole and self._wants_one_launch):
            return False
        spec = self.kv_spec()
        if (of_device := decoder_layers_support.why_not_on(spec.device)) and spec.device.type != "cuda":
            return False
        reason = of_device or decoder_layers_support.why_not_of(spec.compute_dtype, spec.head_dim)
        reason = why_not(*self._whole_decoder()) if reason is None else f"the kernel for all layers {reason}"
        if reason is not None:
            logger.info("hf_paged: steps of few rows run layer by layer: %s", reason)
        return reason is None

    def _whole_decoder(self) -> tuple[list[LayerParts], list[Projections], list[Projections | None], Any]:
        return self._parts_of_layers, self._qkv, self._gate_up, self.model.model.norm

    def _run_at_once(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor | None:
        """Run all layers and the final norm in one launch; None if the kernel cannot run this step, or not yet."""
        assert self._rope.cos is not None and self._rope.sin is not None
        if self._one_launch is None or step.adapters is not None or (found := step.decode_rows) is None:
            return None
        if why_not(*self._whole_decoder()) is not None:  # a caller's code runs between steps, and may have set a bias
            return None
        slots, table = found
        caches = [step.kv_cache(i) for i in range(len(self._parts_of_layers))]
        decoder = decoder_of(*self._whole_decoder(), caches)
        rows = Rows(self._rope.cos, self._rope.sin, slots, step.positions, step.slot_mapping, table)
        return self._one_launch.run(decoder, hidden, rows)

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        if self._runs_modules:
            return self.hidden_states_of_modules(input_ids, step)
        decoder, ops, cos, sin = self.model.model, self._ops, self._rope.cos, self._rope.sin
        assert cos is not None and sin is not None, "prepare() comes first"
        # A streaming caller's code runs between steps, and may change modules. A dry run would not fill the copies.
        if not self._is_untouched() and not is_dry():
            self._look_up_adapters(self.look())
            if self.autocast is not None:
                self._prepare_copies()
                if self._runs_modules:
                    return self.hidden_states_of_modules(input_ids, step)
                self.refresh(None)
            self._look_up_parts()
        rows = self._adapter_rows(step.adapters)
        delta = apply_layer(decoder.embed_tokens, input_ids, rows)
        if (normed_last := self._run_at_once(delta, step)) is not None:
            return normed_last
        cos, sin, positions = ops.step_tables(cos, sin, step.positions)
        residual: torch.Tensor | None = None
        ranks = SINGLE  # over which delta still has to be summed
        lora: Delta | None = None  # the LoRA update that still has to be added to delta
        wanted, narrow = step.wanted, narrow_layer(len(self._parts_of_layers))
        for i in self._different_layers() if is_dry() else range(len(self._parts_of_layers)):
            layer, qkv, gate_up = self._parts_of_layers[i], self._qkv[i], self._gate_up[i]
            normed, residual = self._add_norm(delta, ranks, residual, layer.input_norm, lora)
            product, lora = qkv(normed, rows)
            heads = HeadsToCache(*_weights_and_epsilon(layer.head_norms), cos, sin, positions, step.slot_mapping,
                                 *step.kv_cache(i))
            query = (ops.qk_norm_rope_store(product, heads) if lora is None
                     else lora_qk_norm_rope_store_unchecked(product, lora, heads))
            if wanted is None or i != narrow:
                mixed = step.attend(i, query, layer.options)
            else:
                mixed = step.last_token_step().attend(i, query[wanted], layer.options)
                residual, rows = residual[wanted], self._adapter_rows(_at(wanted, step.adapters))
            delta, ranks, lora = layer.o_proj(mixed.flatten(1), layer.o_linear, rows)
            normed, residual = self._add_norm(delta, ranks, residual, layer.post_norm, lora)
            if gate_up is None or layer.down_proj is None:
                delta, ranks, lora = apply_module(layer.mlp, normed), SINGLE, None
                continue
            if layer.has_silu:
                hidden, shrunk = gate_up.silu_mul(normed, rows, layer.down_proj.lora)
            else:
                product, lora = gate_up(normed, rows)
                gate, up = (product if lora is None else lora_expand_unchecked(product, *lora)).chunk(2, dim=-1)
                hidden, shrunk = layer.mlp.act_fn(gate) * up, None
            delta, ranks, lora = layer.down_proj(hidden, layer.down_linear, rows, shrunk)
        last = self._add_norm(delta, ranks, residual, decoder.norm, lora)[0]
        return last if wanted is None or narrow < len(self._parts_of_layers) else last[wanted]

    def _adapter_rows(self, adapters: torch.Tensor | None) -> AdapterRows | None:
        rows = self.adapter_rows(adapters)
        return rows.ordered() if rows is not None and self._adapters else rows

    def _different_layers(self) -> list[int]:
        """Return, of layers that launch the same kernels, the first two (their predecessors differ) and the last."""
        alike: dict[tuple, list[int]] = {}
        for i, layer in enumerate(self._layers()):
            parts, projections = self._parts_of_layers[i], (self._qkv[i], self._gate_up[i])
            shapes = tuple((parameter.shape, parameter.dtype) for parameter in layer.parameters())
            are_merged = tuple(one is not None and one.weight is not None for one in projections)
            alike.setdefault((shapes, are_merged, parts.options, parts.has_silu), []).append(i)
        return sorted({i for layers in alike.values() for i in (*layers[:2], layers[-1])})

    def _add_norm(self, delta: torch.Tensor, ranks: ParallelGroup, residual: torch.Tensor | None, norm: Any,
                  lora: Delta | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add delta to the residual, and normalize; `lora`: what still has to be added to delta."""
        args = residual, norm.weight, norm.variance_epsilon
        if self._joins and delta.dim() == 3:
            return self._ops.sum_splits_add_rms_norm(delta, *args)
        if ranks is SINGLE:  # under autocast linear layers read the normed tensor, and cast it
            if lora is not None:
                lora_expand_unchecked(delta, *lora)
            return self._ops.add_rms_norm(delta, *args, self.autocast)
        if self._ops is FUSED and (fused := ranks.all_reduce_add_rms_norm(delta, *args)) is not None:
            return fused
        return self._ops.add_rms_norm(ranks.all_reduce(delta), *args)

    def logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return all_columns(self.model.lm_head, self.shard_logits(hidden_states, adapters))

    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        if self._copied is not None and (head := self._copied.by_name.get(HEAD)) is not None:
            return head(hidden_states, self._ops.linear)[0]
        rows = self.adapter_rows(adapters)
        if self._runs_modules:
            with self.casting():
                return apply_head(self.model.lm_head, hidden_states, F.linear, rows)
        return apply_head(self.model.lm_head, hidden_states, self._ops.linear, rows)

    def constants(self) -> tuple:
        decoder = self.model.model
        layers = [
            (a.scaling, a.head_dim, self._epsilons(a),
             layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon,
             self._mlp_constants(layer.mlp))
            for layer in self._layers() for a in (layer.self_attn,)
        ]
        # The raw fields, since `windows` could fail here on a model that eligibility has not checked.
        config = self.model.config
        windows: list[Any] = [repr(getattr(config, name, None)) for name in ("sliding_window", "layer_types")]
        windows += [getattr(layer.self_attn, "sliding_window", None) for layer in self._layers()]
        return decoder.norm.variance_epsilon, decoder.rotary_emb.attention_scaling, windows, tuple(layers)

    def constants_reason(self) -> Reason | None:
        if (reason := super().constants_reason()) is not None:
            return reason
        for i, layer in enumerate(self._layers()):
            if len(set(self._epsilons(layer.self_attn))) > 1:
                return Reason("layer {}'s q_norm and k_norm have different epsilons", i, remedy=DISAGREE)
        return None

    def _epsilons(self, attention: Any) -> tuple[float, ...]:
        if not self._has_head_norms:
            return ()
        return attention.q_norm.variance_epsilon, attention.k_norm.variance_epsilon

    def _mlp_constants(self, mlp: Any) -> Any:
        if not _has_experts(mlp):
            return type(mlp.act_fn).__qualname__
        implementation = self.model.config._experts_implementation
        return implementation, type(mlp.experts.act_fn).__qualname__, *map(plain_values, (mlp.gate, mlp.experts))

    def _merge(self, device: torch.device) -> None:
        """Merge unmerged parameters layer by layer, since the device may not hold all weights twice."""
        if self._memory is None or self._memory.device != device:
            self._memory = adjacent_memory(device)
        if self._memory is None:
            return
        copied = self._copies() or {}
        if not self._merged and self._groups is not None and copied.keys() == self._groups.by_name.keys():
            return  # nothing is left to merge
        held = set(map(id, tensors_inside(self.model)[0]))
        self._merged = {key: merged for key, merged in self._merged.items() if merged.lies_in(held)}
        for i, layer in enumerate(self._layers()):
            linears = {key: self._bases(found) for key, found in _groups(i, layer).items()
                       if key not in self._merged and key not in copied}
            found = zip(linears, merge(list(linears.values()), self._memory), strict=True)
            self._merged |= {key: merged for key, merged in found if merged is not None}
        self._memory.finish()

    def _collect(self) -> tuple[list[Projections], list[Projections | None]]:
        """Return every layer's q, k, v and gate, up projections as they are now."""
        found = [
            {key: self._projections(key, linears) for key, linears in _groups(i, layer).items()}
            for i, layer in enumerate(self._layers())
        ]
        return [of[f"{i}{QKV_GROUP}"] for i, of in enumerate(found)], [of.get(f"{i}.mlp") for i, of in enumerate(found)]

    def _collect_parts(self) -> list[LayerParts]:
        """Return every layer's other parts as they are now."""
        found = [
            LayerParts(
                layer.input_layernorm,
                (layer.self_attn.q_norm, layer.self_attn.k_norm) if self._has_head_norms else None,
                AttentionOptions(layer.self_attn.scaling, self._mask_window(i)),
                self._row_product(f"{i}.o_proj", layer.self_attn.o_proj),
                layer.post_attention_layernorm, layer.mlp, isinstance(getattr(layer.mlp, "act_fn", None), SILU),
                None if _has_experts(layer.mlp) else self._row_product(f"{i}.down_proj", layer.mlp.down_proj),
                self._ops.linear, self._ops.linear,
            )
            for i, layer in enumerate(self._layers())
        ]
        if not self._joins:
            return found
        return [parts._replace(o_linear=self._row_linear(parts.o_proj), down_linear=self._row_linear(parts.down_proj))
                for parts in found]

    def _row_linear(self, product: Any) -> Callable[..., torch.Tensor]:
        alone = type(product) is RowProduct and product.is_plain and product.lora is None
        return self._ops.linear_parts if alone else self._ops.linear

    def _bases(self, linears: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
        """Return the layers whose products are computed: of a LoRA layer the base layer, if kernels add the update."""
        return tuple(map(self._adapters.base, linears)) if self._adapters else linears

    def _row_product(self, key: str, linear: nn.Module) -> RowProduct | CopiedLinears:
        lora = self._adapters.group((linear,)) if self._adapters else None
        if self._copied is not None and (copied := self._copied.by_name.get(key)) is not None:
            return copied._replace(lora=lora)
        return RowProduct.of(self._bases((linear,))[0], lora)

    def _projections(self, key: str, linears: tuple[nn.Module, ...]) -> Projections:
        """Return projections with copies, or with the merged weight if the merged parameters still lie in it."""
        lora = self._adapters.group(linears) if self._adapters else None
        linears = self._bases(linears)
        if self._copied is not None and (copied := self._copied.by_name.get(key)) is not None:
            return Projections(linears, copied.weight, True, self._ops, self._ops.linear, copied.bias, lora)
        merged = self._merged.get(key)
        intact = merged is not None and merged.belongs_to(linears)
        weight = merged.current() if merged is not None and intact else None
        in_parts = self._joins and lora is None and key.endswith(QKV_GROUP)  # the next kernel sums them
        linear = self._ops.linear_parts if in_parts else self._ops.linear
        return Projections(linears, weight, all(map(is_plain_linear, linears)), self._ops, linear, lora=lora)


def narrow_layer(num_layers: int) -> int:
    """Return the layer from whose attention on only tokens whose final hidden states are read are computed: of other
    tokens later layers need only keys and values, and the last layer has no later one."""
    return num_layers - 1


def _at(tokens: torch.Tensor, adapters: torch.Tensor | None) -> torch.Tensor | None:
    return None if adapters is None else adapters[tokens]


def _weights_and_epsilon(norms: tuple[Any, Any] | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    if norms is None:
        return None, None, 0.0
    query, key = norms
    return query.weight, key.weight, query.variance_epsilon


def _groups(i: int, layer: Any) -> dict[str, tuple[nn.Module, ...]]:
    """Return the linear layers of a decoder layer that share an input, without experts."""
    groups = {f"{i}{QKV_GROUP}": tuple(getattr(layer.self_attn, name) for name in QKV)}
    if not _has_experts(layer.mlp):
        groups[f"{i}.mlp"] = tuple(getattr(layer.mlp, name) for name in GATE_UP)
    return groups


def _all_groups(i: int, layer: Any) -> dict[str, tuple[nn.Module, ...]]:
    """Return `_groups`, and the linear layers that share their input with no other."""
    groups = {**_groups(i, layer), f"{i}.o_proj": (layer.self_attn.o_proj,)}
    if not _has_experts(layer.mlp):
        groups[f"{i}.down_proj"] = (layer.mlp.down_proj,)
    return groups


def _has_experts(mlp: Any) -> bool:
    return "experts" in mlp._modules
