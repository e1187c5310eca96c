"""Executor of Qwen3, Qwen3-MoE and Llama: layers on packed tokens with merged projections, fused ops and pages.

Follows `Qwen3Model.forward`, `Qwen3DecoderLayer.forward` and `Qwen3Attention.forward` of transformers 5.17 to 5.24 and
their like in the other families, rounding included. A projection that is not a plain layer (LoRA, quantized) is called
as it stands, and so is a block of experts that `models/experts.py` does not take.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.families import SILU, Family
from hf_paged.guards.hints import DISAGREE
from hf_paged.guards.original_classes import of_family
from hf_paged.guards.original_code import OriginalCode
from hf_paged.guards.snapshot import experts_implementation
from hf_paged.kernels._checks import Expected, check_tensors
from hf_paged.kernels.attention.types import AttentionOptions
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.experts.join import ExpertOutputs, join_experts_add_rms_norm
from hf_paged.kernels.hopper import decoder_layers_support
from hf_paged.kernels.layer.linear import makes_parts
from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache
from hf_paged.kernels.lora.lora_expand import Delta, lora_expand
from hf_paged.kernels.lora.lora_qk_norm_rope_store import lora_qk_norm_rope_store
from hf_paged.models.base import AttentionMask, KVSpec, StepContext
from hf_paged.models.copied_weights import Groups, can_be_copied, has_4bit, is_4bit, may_have_4bit
from hf_paged.models.executor import ModelExecutor, fields_of, plain_values
from hf_paged.models.experts import ExpertsParts, ExpertsReader, apply_experts
from hf_paged.models.layer_ops import FUSED, PLAIN, apply_head, is_plain_linear
from hf_paged.models.linears import HEAD, MLP_GROUP, QKV_GROUP, DecoderLinears, LinearView, has_experts
from hf_paged.models.lora import is_loaded, is_patched, reads_tables
from hf_paged.models.one_launch import OneLaunch, Rows, decoder_of, why_not
from hf_paged.models.packed.dequantizing import Dequantizing, WeightsPlan, reads_packed
from hf_paged.models.rope import RopeTable, longest_length
from hf_paged.models.tuners import AdapterRows, apply_layer, inside_wrappers
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import RowParallelLinear, VocabParallelHead, local_kv_heads, sharded_class

logger = logging.getLogger(__name__)
_SHAPES = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
# A module of a model, its path, and the class it has to have; None for a layer of any known kind (linear, LoRA).
_Part = tuple[str, nn.Module, type | None]


class LayerParts(NamedTuple):
    """Parts of a layer that a step uses."""

    input_norm: Any
    qkv: LinearView
    head_norms: tuple[Any, Any] | None  # of query and key heads
    options: AttentionOptions
    o_proj: LinearView
    post_norm: Any
    mlp: Any
    gate_up: LinearView | None  # None: a block of experts, as for `down_proj`
    down_proj: LinearView | None
    experts: ExpertsParts | None  # None: no experts, or a block that is called as it stands

    def is_same(self, other: LayerParts) -> bool:
        """Return whether a step computes the same with both."""
        return all(one.is_same(two) if isinstance(one, (LinearView, ExpertsParts)) and two is not None else one == two
                   for one, two in zip(self, other, strict=True))


class ModelState(NamedTuple):
    """State of a model that layers were looked up for: its structure and places (`ModelWatch`), and what calls ask."""

    structure: int
    places: int
    autocast: torch.dtype | None
    names: tuple[str, ...]  # of adapters that rows can use
    is_patched: bool  # whether PEFT's LoRA layers, of which kernels compute some, are patched


class FusedExecutor(ModelExecutor):
    """Executor that runs the layers of one family by its own code, on `MergedWeight` and with `LayerOps`.

    Under autocast a dense model of plain linear layers runs so with `CopiedWeights`; any other model (quantized
    layers, experts) runs by its own modules. 4-bit layers of bitsandbytes run so with `CopiedWeights`, too, or by
    kernels that read their bytes, as ``dequantize`` (see `PagedConfig`) and memory allow it.
    """

    body = "model"
    calls_modules = False

    def __init__(self, model: PreTrainedModel, *, family: Family, merge_weights: bool = True,
                 fused_kernels: bool = True, one_launch: bool = True, fused_experts: bool = True,
                 dequantize: bool | str = "auto", routed_experts: bool = False) -> None:
        self.family = family
        self.has_experts = "experts" in family.parts
        self._spec: tuple[tuple, KVSpec] | None = None  # with the values that it was read from
        super().__init__(model, family.model_class, family.modeling, routed_experts=routed_experts)
        self._merge_weights = merge_weights
        self._ops = FUSED if fused_kernels else PLAIN
        self._wants_one_launch = one_launch and fused_kernels
        self._experts = ExpertsReader(self, is_wanted=fused_experts and fused_kernels)
        self._dequantizing = Dequantizing(dequantize)
        self._has_head_norms = "q_norm" in family.parts
        self._rope = RopeTable()
        self._linears = DecoderLinears()
        self._layer_parts: list[LayerParts] = []
        self._runs_modules = False  # whether modules run as they stand, under autocast
        self._joins = False  # whether the next kernel may sum the parts of a product of few rows
        self._one_launch: OneLaunch | None = None  # None: its kernel does not support the layers
        # What the linear layers, and the parts of layers, were looked up for; None: after an interrupt, too.
        self._linears_for: ModelState | None = None
        self._parts_for: ModelState | None = None
        self._step_structure: int | None = None  # the number that steps compare with
        self._copied_contents: int | None = None  # the number when the copies were filled

    # -- what the model is, by the names of its attributes ----------------------------------------------------------

    def original_code(self) -> OriginalCode:
        return of_family(self.family)

    @property
    def decoder(self) -> Any:
        return self.model.model

    @property
    def config(self) -> Any:
        return self.model.config

    def kv_spec(self) -> KVSpec:
        # Kept, since every step reads it and a config takes microseconds for each of its fields.
        config, decoder, size = self.config, self.decoder, self.group.size
        weight, fields = decoder.embed_tokens.weight, vars(config)
        made_of = (weight.dtype, weight.device, self.autocast, size, len(decoder.layers),
                   fields.get("_heterogeneity_spec"), *map(fields.get, _SHAPES))
        if self._spec is None or self._spec[0] != made_of:
            heads = config.num_attention_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            self._spec = made_of, KVSpec(
                len(self._layers()), heads // size, local_kv_heads(config.num_key_value_heads, size), head_dim,
                self.autocast or weight.dtype, weight.dtype, weight.device, routes=self.routes)
        return self._spec[1]

    def masks(self) -> tuple[AttentionMask, ...]:
        return tuple(AttentionMask(self._mask_window(layer)) for layer in range(len(self._layers())))

    def max_length(self, asked: int | None = None) -> int:
        return longest_length(self.config, asked)

    @property
    def num_logits(self) -> int:
        head = self.model.lm_head
        if type(head) is nn.Linear:
            return len(head.weight)
        number: int = getattr(head, "vocab_size" if isinstance(head, VocabParallelHead) else "out_features",
                              self.vocab_size)
        return number

    def attention_configs(self) -> list[Any]:
        modules = (self.decoder, *(layer.self_attn for layer in self._layers()))
        return list({id(module.config): module.config for module in modules}.values())

    def _layers(self) -> list[Any]:
        # A list first: slicing a ModuleList would register every layer again in every step.
        return list(self.decoder.layers)[: self.config.num_hidden_layers]

    def _mask_window(self, layer: int) -> int | None:
        """Return the window of the mask that stock makes for this layer."""
        config, windows = self.config, self.family.windows
        if windows == "by layer":
            windows = "all" if config.layer_types[layer] == "sliding_attention" else "none"
        return config.sliding_window if windows == "all" else None

    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        return ((name, module, expected) for name, module, expected in self._parts() if expected is not None)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module, expected in self._parts() if expected is None)

    def why_not_constants(self) -> Reason | None:
        reasons = (self._why_not_config, self._why_not_layer, self.why_not_instance, self.why_not_registry,
                   self._why_not_epsilons)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def _why_not_config(self) -> Reason | None:
        config, layers = self.config, self._layers()
        if not layers:
            return Reason("the model has no layers", remedy=DISAGREE)
        for name, module, _ in self.own_modules():
            own = vars(module).get("config", config)
            if own is not config and fields_of(own) != fields_of(config):
                return Reason("{} has another config than the model", name, remedy=DISAGREE)
        if not getattr(config, "is_causal", True):
            return Reason("config.is_causal is False", remedy=DISAGREE)
        if self.num_logits > self.vocab_size:
            return Reason("lm_head has {} rows, the embedding {}: a token may have no vector", self.num_logits,
                          self.vocab_size, remedy="`model.resize_token_embeddings(n)` changes both.")
        if len(getattr(config, "layer_types", None) or layers) < len(layers):
            return Reason("config.layer_types is shorter than the model", remedy=DISAGREE)
        return None

    def _why_not_layer(self) -> Reason | None:
        spec = self.kv_spec()
        for i, layer in enumerate(self._layers()):
            window = self._mask_window(i)
            expected = {"is_causal": True, "layer_idx": i, "head_dim": spec.head_dim, "sliding_window": window,
                        "num_key_value_groups": spec.num_heads / spec.num_kv_heads}
            for name, value in expected.items():
                if (found := getattr(layer.self_attn, name, value)) != value:
                    return Reason("layer {} has {}={}: its config expects {}", i, name, found, value, remedy=DISAGREE)
            if window is not None and window < 2:  # stock's cache then keeps all keys, and its masks follow the cache
                return Reason("layer {} has sliding_window={}: expected None or at least 2", i, window,
                              remedy="Set a window of at least two tokens, or None.")
        return None

    def _why_not_epsilons(self) -> Reason | None:
        for i, layer in enumerate(self._layers()):
            if len(set(self._epsilons(layer.self_attn))) > 1:
                return Reason("layer {}'s q_norm and k_norm have different epsilons", i, remedy=DISAGREE)
        return None

    def _parts(self) -> list[_Part]:
        """Return all modules of the model, except modules inside of a layer that is called as it stands."""
        classes = {name: self.family.classes(name) for name in self.family.parts} | {"act_fn": SILU}
        if experts := classes.get("experts"):
            classes["experts"] = (*experts, *map(sharded_class, experts))
        return list(_parts_inside("", self.model, classes))

    # -- what is made of the weights, and steps -----------------------------------------------------------------------

    def prepare(self, max_model_len: int) -> None:
        spec = self.kv_spec()
        self._read_linears()
        is_same = self._parts_for == self._linears_for
        if not is_same:
            self._drop_parts()
            self._prepare_copies()
            if not self._runs_modules:  # shapes once for every state, since kernels do not check them in every step
                heads = self.model.config.num_attention_heads // self.group.size
                check_weights(self.model, self._layers(), spec, heads,
                              spec.compute_dtype if self.autocast is None else None)
        if self._runs_modules:
            self._parts_for = self._linears_for
            return
        self._rope.update(self.model.model.rotary_emb, max_model_len, spec.compute_dtype, spec.device)
        may_merge = self._merge_weights and not (is_same and not self._unmerged())
        if may_merge and self._linears.merge(self.model, spec.device):
            self.watch.compare_again()  # the parameters lie elsewhere now
            self._read_linears()
            is_same = False
        if not is_same:
            self._look_up_parts()
            self._parts_for = self._linears_for  # last: after an interrupt all is looked up again
        if self._linears.copied is not None and not self.has_copies:  # the bytes of 4-bit weights need no `refresh`
            self._copied_contents = self.watch.step_contents(self.model)
        self._linears.keep_merged_alive()
        if self._one_launch is not None:
            self._one_launch.look_again()

    def _drop_parts(self) -> None:
        """Let the next step, and the next call, look up parts anew. Parts hold copies, which then may be freed."""
        self._parts_for, self._step_structure, self._layer_parts = None, None, []

    def _state(self) -> ModelState:
        model, patched = self.model, bool(self._linears.adapters) and is_patched()
        return ModelState(self.watch.structure(model), self.watch.places(model), self.autocast, self._row_names,
                          patched)

    def _read_linears(self) -> None:
        """Look up linear layers and adapters if anything changed that they depend on."""
        if (state := self._state()) != self._linears_for:
            self._linears_for = None
            device = self.kv_spec().device
            by_tables = is_loaded() and self._ops is FUSED and not self.group.is_parallel and reads_tables(device)
            self._linears.read(self.model, self._layers(), device, by_tables=by_tables, names=self._row_names,
                               autocast=self.autocast)
            self._linears_for = state._replace(is_patched=bool(self._linears.adapters) and is_patched())

    def _prepare_copies(self) -> None:
        """Make or drop copies as the running calls need them; `refresh` fills them."""
        plan = self._plan_weights()
        self._runs_modules = self.autocast is not None and not plan.copied
        try:
            self._linears.make(plan)
        except torch.OutOfMemoryError:
            if not has_4bit(plan.copied):
                raise
            self._dequantizing.without_copies(plan.nbytes)
            self._prepare_copies()

    def _plan_weights(self) -> WeightsPlan:
        """Return what steps are to multiply with; no groups under autocast: modules have to run as they stand."""
        dtype, device = self.autocast or self.kv_spec().compute_dtype, self.kv_spec().device
        if self.autocast is None and not may_have_4bit():
            return WeightsPlan(dtype)
        self._read_linears()
        groups: Groups = self._castable() if self.autocast is not None else self._linears.packed_bases(dtype)
        return self._dequantizing.plan(groups, dtype, device, by_kernels=self._reads_packed(device, dtype), head=HEAD,
                                       whole=self.autocast is not None)

    def _reads_packed(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self._ops is FUSED and not self.group.is_parallel and reads_packed(device, dtype)

    def describe_4bit(self, device: torch.device) -> str | None:
        """Return how 4-bit layers would run on a device without autocast, and why; None if there are none."""
        if not may_have_4bit() or not any(map(is_4bit, self.model.modules())):
            return None
        self._read_linears()
        dtype = self.kv_spec().compute_dtype
        return self._dequantizing.describe(self._linears.packed_bases(dtype), dtype, device, head=HEAD,
                                           by_kernels=self._reads_packed(device, dtype))

    def _castable(self) -> Groups:
        """Return the groups of linear layers if autocast would cast nothing else."""
        assert self.autocast is not None
        if type(self.model.model.embed_tokens) is not nn.Embedding:
            return {}
        if any(has_experts(layer.mlp) for layer in self._layers()):
            return {}
        bases = self._linears.bases()
        # A 4-bit layer hands on the dtype of its input, whatever autocast says.
        if has_4bit(bases) and any(norm.weight.dtype != self.autocast for norm in self._norms()):
            return {}
        return bases if can_be_copied(bases, self.autocast) else {}

    def _norms(self) -> Iterator[Any]:
        """Yield the embedding and the norms, whose dtype the linear layers' inputs have."""
        yield self.model.model.embed_tokens
        yield self.model.model.norm
        for layer in self._layers():
            yield from (layer.input_layernorm, layer.post_attention_layernorm)

    def refresh(self, checksum: torch.Tensor | None) -> None:
        if self._linears.copied is not None:
            self._copied_contents = self.watch.step_contents(self.model)  # first, so that later changes are noticed
            self._read_linears()
            self._linears.copied.refresh(self._linears.bases(), checksum)

    def copies_are_stale(self) -> bool:
        if self._runs_modules or self._linears.copied is None:
            return False
        return self.watch.step_contents(self.model) != self._copied_contents

    @property
    def has_copies(self) -> bool:
        return bool(self._linears.copies())

    @property
    def copied_bytes(self) -> int:
        return 0 if self._linears.copied is None else self._linears.copied.nbytes

    def bytes_to_come(self) -> int:
        copied = self._linears.copied
        return 0 if copied is not None and copied.is_here else self._plan_weights().nbytes

    def own_tensors(self) -> list[torch.Tensor]:
        return self._linears.tensors()

    def is_current(self) -> bool:
        if self._parts_for != self._state() and not self._would_find_the_same():
            return False
        return self._runs_modules or self._rope.is_made_from(self.model.model.rotary_emb)

    def _would_find_the_same(self) -> bool:
        """Return whether looking up everything again would change nothing."""
        self._read_linears()
        plan = self._plan_weights()
        if self._runs_modules != (self.autocast is not None and not plan.copied):
            return False
        if self._runs_modules:
            return True
        if not self._linears.is_made(plan):
            return False
        found = self._collect_parts()
        return len(found) == len(self._layer_parts) and all(map(LayerParts.is_same, self._layer_parts, found))

    def drop_references(self) -> None:
        super().drop_references()
        self._drop_parts()
        self._linears_for = None
        self._linears.drop_references()
        if self._one_launch is not None:
            self._one_launch.drop_references()

    def release(self) -> None:
        super().release()
        self._rope, self._linears, self._one_launch = RopeTable(), DecoderLinears(), None
        self._dequantizing = Dequantizing(self._dequantizing.wants)

    def may_use_one_launch(self, rows: int, lengths: np.ndarray) -> bool:
        return self._one_launch is not None and decoder_layers_support.pays_off(rows, lengths)

    def uses_one_launch(self, rows: int) -> bool:
        return self._one_launch is not None and self._one_launch.is_ready(rows)

    def captured_tensors(self) -> list[torch.Tensor]:
        return [] if self._one_launch is None else self._one_launch.captured_tensors()

    @property
    def has_unmerged(self) -> bool:
        return self._merge_weights and not self._runs_modules and any(view.are_plain for view in self._unmerged())

    def _unmerged(self) -> list[LinearView]:
        """Return the groups of layers that have neither a merged weight nor a copy."""
        return [view for parts in self._layer_parts for view in (parts.qkv, parts.gate_up)
                if view is not None and view.weight is None]

    def _look_up_parts(self) -> None:
        structure = self.watch.watch_modules(self.model)  # first, so that later changes are noticed
        whole = self.autocast is None and not self.group.is_parallel
        device = self.kv_spec().device
        self._joins = whole and makes_parts(device)
        self._layer_parts = self._collect_parts()
        if not self._may_run_at_once(whole):
            self._one_launch = None
        elif self._one_launch is None or self._one_launch.device != device:
            self._one_launch = OneLaunch(device)
        self._step_structure = structure  # last: after an interrupt all is looked up again

    def _look_up_for_step(self) -> None:
        """Look up what a step computes with, after a caller's code changed modules between two steps."""
        self._read_linears()
        self._drop_parts()
        self._prepare_copies()
        if not self._runs_modules:
            self.refresh(None)
            self._look_up_parts()

    def _may_run_at_once(self, whole: bool) -> bool:
        """Return whether one launch may run all layers; `whole`: one device computes in the model's own dtype."""
        if not (whole and self._wants_one_launch):
            return False
        spec = self.kv_spec()
        if (of_device := decoder_layers_support.why_not_on(spec.device)) and spec.device.type != "cuda":
            return False
        reason = of_device or decoder_layers_support.why_not_of(spec.compute_dtype, spec.head_dim)
        if reason is None:
            reason = why_not(self._layer_parts, self.model.model.norm)
        else:
            reason = f"the kernel for all layers {reason}"
        if reason is not None:
            logger.info("hf_paged: steps of few rows run layer by layer: %s", reason)
        return reason is None

    def _run_at_once(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor | None:
        """Run all layers and the final norm in one launch; None if the kernel cannot run this step, or not yet."""
        if self._one_launch is None or step.adapters is not None or (found := step.decode_rows) is None:
            return None
        layers, norm = self._layer_parts, self.model.model.norm
        if why_not(layers, norm) is not None:  # a caller's code runs between steps, and may have set a bias
            return None
        slots, table = found
        decoder = decoder_of(layers, norm, [step.kv_cache(i) for i in range(len(layers))])
        rows = Rows(self._rope.cos, self._rope.sin, slots, step.positions, step.slot_mapping, table)
        return self._one_launch.run(decoder, hidden, rows)

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        if self._runs_modules:
            return super().hidden_states(input_ids, step)
        decoder, ops, cos, sin = self.model.model, self._ops, self._rope.cos, self._rope.sin
        # A streaming caller's code runs between steps, and may change modules. A dry run would not fill the copies.
        if not is_dry() and self.watch.step_structure(self.model) != self._step_structure:
            self._look_up_for_step()
            if self._runs_modules:
                return super().hidden_states(input_ids, step)
        rows = None if step.adapters is None else self._adapter_rows(step.adapters)
        embedded = apply_layer(decoder.embed_tokens, input_ids, rows)
        if (normed_last := self._run_at_once(embedded, step)) is not None:
            return normed_last
        cos, sin, positions = ops.step_tables(cos, sin, step.positions)
        residual: torch.Tensor | None = None
        delta: torch.Tensor | ExpertOutputs = embedded
        ranks = SINGLE  # over which delta still has to be summed
        lengths = step.row_lengths if any(layer.experts is not None for layer in self._layer_parts) else None
        lora: Delta | None = None  # the LoRA update that still has to be added to delta
        records = self.route_recorders(step)  # of all tokens, so that the last layer leaves none out
        wanted, narrow = step.wanted, narrow_layer(len(self._layer_parts) + (self.routes is not None))
        for i in self._different_layers() if is_dry() else range(len(self._layer_parts)):
            layer = self._layer_parts[i]
            normed, residual = self._add_norm(delta, ranks, residual, layer.input_norm, lora)
            product, _, lora = layer.qkv(normed, rows)
            heads = HeadsToCache(*_weights_and_epsilon(layer.head_norms), cos, sin, positions, step.slot_mapping,
                                 *step.kv_cache(i))
            query = (ops.qk_norm_rope_store(product, heads) if lora is None
                     else lora_qk_norm_rope_store(product, lora, heads))
            if wanted is None or i != narrow:
                mixed = step.attend(i, query, layer.options)
            else:
                mixed = step.last_token_step().attend(i, query[wanted], layer.options)
                residual = residual[wanted]
                if step.adapters is not None:
                    rows = self._adapter_rows(step.adapters[wanted])
            delta, ranks, lora = layer.o_proj(mixed.flatten(1), rows)
            normed, residual = self._add_norm(delta, ranks, residual, layer.post_norm, lora)
            if layer.gate_up is None or layer.down_proj is None:
                (delta, ranks), lora = apply_experts(layer.mlp, layer.experts, normed, lengths, next(records)), None
                continue
            hidden, shrunk = layer.gate_up.silu_mul(normed, rows, layer.down_proj.lora)
            delta, ranks, lora = layer.down_proj(hidden, rows, shrunk)
        last = self._add_norm(delta, ranks, residual, decoder.norm, lora)[0]
        return last if wanted is None or narrow < len(self._layer_parts) else last[wanted]

    def _adapter_rows(self, adapters: torch.Tensor) -> AdapterRows:
        rows = AdapterRows(adapters, self._row_names)
        return rows.ordered() if self._linears.adapters else rows

    def _different_layers(self) -> list[int]:
        """Return, of layers that launch the same kernels, the first two (their predecessors differ) and the last."""
        alike: dict[tuple, list[int]] = {}
        for i, layer in enumerate(self._layers()):
            parts = self._layer_parts[i]
            shapes = tuple((parameter.shape, parameter.dtype) for parameter in layer.parameters())
            are_merged = tuple(view is not None and view.weight is not None for view in (parts.qkv, parts.gate_up))
            alike.setdefault((shapes, are_merged, parts.options), []).append(i)
        return sorted({i for layers in alike.values() for i in (*layers[:2], layers[-1])})

    def _add_norm(self, delta: torch.Tensor | ExpertOutputs, ranks: ParallelGroup, residual: torch.Tensor | None,
                  norm: Any, lora: Delta | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add delta to the residual, and normalize; `lora`: what still has to be added to delta."""
        args = residual, norm.weight, norm.variance_epsilon
        if isinstance(delta, ExpertOutputs):
            assert residual is not None
            return join_experts_add_rms_norm(delta, residual, norm.weight, norm.variance_epsilon)
        if self._joins and delta.dim() == 3:
            return self._ops.add_rms_norm(delta, *args)
        if ranks is SINGLE:  # under autocast linear layers read the normed tensor, and cast it
            if lora is not None:
                lora_expand(delta, *lora)
            return self._ops.add_rms_norm(delta, *args, self.autocast)
        if self._ops is FUSED and (fused := ranks.all_reduce_add_rms_norm(delta, *args)) is not None:
            return fused
        return self._ops.add_rms_norm(ranks.all_reduce(delta), *args)

    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        copied = self._linears.copied
        if copied is not None and (head := copied.by_name.get(HEAD)) is not None:
            return self._ops.linear(hidden_states, head.weight, head.bias)
        if self._runs_modules:
            return super().shard_logits(hidden_states, adapters)
        return apply_head(self.model.lm_head, hidden_states, self._ops.linear, self.adapter_rows(adapters))

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

    def _epsilons(self, attention: Any) -> tuple[float, ...]:
        if not self._has_head_norms:
            return ()
        return attention.q_norm.variance_epsilon, attention.k_norm.variance_epsilon

    def _mlp_constants(self, mlp: Any) -> Any:
        if not has_experts(mlp):
            return None
        return experts_implementation(self.model.config), *map(plain_values, (mlp.gate, inside_wrappers(mlp.experts)))

    def _collect_parts(self) -> list[LayerParts]:
        """Return every layer's parts as they are now."""
        return [
            LayerParts(
                layer.input_layernorm, self._view(f"{i}{QKV_GROUP}"),
                (layer.self_attn.q_norm, layer.self_attn.k_norm) if self._has_head_norms else None,
                AttentionOptions(layer.self_attn.scaling, self._mask_window(i)), self._view(f"{i}.o_proj"),
                layer.post_attention_layernorm, layer.mlp, self._view(f"{i}{MLP_GROUP}"),
                self._view(f"{i}.down_proj"), self._experts.parts(layer.mlp) if has_experts(layer.mlp) else None,
            )
            for i, layer in enumerate(self._layers())
        ]

    def why_not_experts(self, device: torch.device) -> str | None:
        """Return why experts would run by transformers' modules on a device; None if there are none, too."""
        found = (self._experts.read(layer.mlp, device) for layer in self._layers() if has_experts(layer.mlp))
        return next((why for why in found if isinstance(why, str)), None)

    def _view(self, key: str) -> Any:
        return self._linears.view(key, self._ops, joins=self._joins)


def narrow_layer(num_layers: int) -> int:
    """Return the layer from whose attention on only tokens whose final hidden states are read are computed: of other
    tokens later layers need only keys and values, and the last layer has no later one."""
    return num_layers - 1


def _weights_and_epsilon(norms: tuple[Any, Any] | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    if norms is None:
        return None, None, 0.0
    query, key = norms
    return query.weight, key.weight, query.variance_epsilon


KEYS_VALUES = ("k_proj", "v_proj")


def check_weights(model: Any, layers: list[Any], spec: KVSpec, num_heads: int, dtype: torch.dtype | None) -> None:
    """Raise ValueError for the first norm or plain linear layer of another shape or dtype than expected.

    `num_heads`: this rank's query heads. `dtype`: dtype of all weights; None: any. Results of modules that are called
    as they stand are checked where they are called.
    """
    hidden, head = model.config.hidden_size, model.lm_head
    check_tensors(_vector("norm", model.model.norm, hidden, dtype))
    if is_plain_linear(head) or type(head) is VocabParallelHead:
        check_tensors(Expected("lm_head.weight", head.weight, (None, hidden), dtype, strided=True))
    for i, layer in enumerate(layers):
        check_tensors(*_of_layer(f"layers.{i}.", layer, spec, num_heads, hidden, dtype))


def _of_layer(prefix: str, layer: Any, spec: KVSpec, num_heads: int, hidden: int,
              dtype: torch.dtype | None) -> Iterator[Expected]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _vector(prefix + name, getattr(layer, name), hidden, dtype)
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(attention, name, None)) is not None:
            yield _vector(prefix + name, norm, spec.head_dim, dtype)
    queries, keys = num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"q_proj": (queries, hidden), "o_proj": (hidden, queries)} | dict.fromkeys(KEYS_VALUES, (keys, hidden))
    yield from _linears(prefix, attention, shapes, dtype)
    if "experts" not in mlp._modules and is_plain_linear(_inside(mlp.gate_proj)):
        inner = len(_inside(mlp.gate_proj).weight)
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        yield from _linears(prefix, mlp, shapes, dtype)


def _linears(prefix: str, owner: Any, shapes: dict[str, tuple[int, int]],
             dtype: torch.dtype | None) -> Iterator[Expected]:
    for name, shape in shapes.items():
        linear: Any = _inside(getattr(owner, name))
        if not is_plain_linear(linear) and type(linear) is not RowParallelLinear:
            continue
        yield Expected(f"{prefix}{name}.weight", linear.weight, shape, dtype, strided=True)
        if linear.bias is not None:
            yield Expected(f"{prefix}{name}.bias", linear.bias, shape[:1], dtype, strided=True)


def _inside(linear: Any) -> Any:
    """Return the base layer of a tuner's layer (LoRA), or the layer itself."""
    return linear._modules.get("base_layer", linear)


def _vector(name: str, norm: nn.Module, size: int, dtype: torch.dtype | None) -> Expected:
    return Expected(f"{name}.weight", norm.weight, (size,), dtype)  # type: ignore[arg-type]


def _parts_inside(path: str, module: nn.Module, classes: dict[str, tuple[type, ...]]) -> Iterator[_Part]:
    for key, child in zip(module._modules, map(inside_wrappers, module._modules.values()), strict=True):
        name = f"{path}.{key}" if path else key
        if key == "layers" and type(child) is nn.ModuleList:
            for i, layer in enumerate(child):
                yield from _part(f"{name}.{i}", layer, classes["layers"], classes)
        elif child is not None:
            yield from _part(name, child, classes.get(key, ()), classes)


def _part(name: str, module: nn.Module, allowed: tuple[type, ...],
          classes: dict[str, tuple[type, ...]]) -> Iterator[_Part]:
    is_known = type(module) in allowed
    yield name, module, type(module) if is_known else next(iter(allowed), None)
    if is_known:
        yield from _parts_inside(name, module, classes)
