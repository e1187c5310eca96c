"""Common base of the executors of all families in `families.py`: shapes, modules inside, and checks of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.errors import Reason
from hf_paged.guards.activations import ELEMENTWISE
from hf_paged.guards.families import Family
from hf_paged.guards.hints import DISAGREE, ONE_DTYPE, PUT_BACK, REMOVE_HOOK, UNDO_PATCH, UNDO_REPLACEMENT
from hf_paged.guards.hub_kernels import functions_of, kernel_numbers, replacement_reason
from hf_paged.guards.original_classes import of_family, patched_class, patched_entry
from hf_paged.models.base import KVSpec, ModelExecutor, StepContext
from hf_paged.models.lora_rows import by_row
from hf_paged.models.paged_calls import STEP_ARGUMENT, WindowedStep, implementation_of, paged_call
from hf_paged.models.parts import ModulePart, parts_of
from hf_paged.models.rope import longest_length
from hf_paged.parallel.layers import VocabParallelEmbedding, VocabParallelHead, stock_class
from hf_paged.parallel.shards import local_kv_heads

# Fields of the config that forwards read while they run.
CONFIG_CONSTANTS = (
    "num_hidden_layers", "num_attention_heads", "sliding_window", "layer_types", "final_logit_softcapping", "is_causal",
    "use_bidirectional_attention", "_experts_implementation", "logits_scaling", "rope_parameters",
)
_SHAPES = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"


class DecoderExecutor(ModelExecutor):
    """Executor for one family; subclasses define how its layers run on packed tokens."""

    calls_modules = False  # whether all modules run as they stand, on packed tokens

    def __init__(self, model: PreTrainedModel, *, family: Family, **techniques: bool) -> None:
        super().__init__(model, family.model_class, **techniques)
        self._family = family
        self._functions = functions_of(family.modeling)
        self._spec: tuple[tuple, KVSpec] | None = None  # with the values that it was read from
        of_family(family)  # record originals now, before code patches the enabled model

    @property
    def decoder(self) -> Any:
        """Module that holds embedding, layers and final norm."""
        return self.model.model if self._family.wrapper is None else self.model.model.language_model

    def kv_spec(self) -> KVSpec:
        # Kept, since every step reads it and a config takes microseconds for each of its fields.
        config, decoder, size = self.config, self.decoder, self.group.size
        weight, fields = decoder.embed_tokens.weight, vars(config)
        made_of = (weight.dtype, weight.device, self.autocast, size, len(decoder.layers),
                   fields.get("_heterogeneity_spec"), *map(fields.get, _SHAPES))
        if self._spec is None or self._spec[0] != made_of:
            self._spec = made_of, self._read_spec(config, weight, size)
        return self._spec[1]

    def _read_spec(self, config: Any, weight: torch.Tensor, size: int) -> KVSpec:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = local_kv_heads(config.num_key_value_heads, size)
        return KVSpec(len(self._layers()), heads // size, kv_heads, head_dim, self.autocast or weight.dtype,
                      weight.dtype, weight.device)

    @property
    def config(self) -> Any:
        return self.model.config if self._family.wrapper is None else super().config  # a slow look-up

    def windows(self) -> tuple[int | None, ...]:
        return tuple(map(self._mask_window, range(len(self._layers()))))

    def max_length(self, asked: int | None = None) -> int:
        return longest_length(self.config, asked)

    @property
    def vocab_size(self) -> int:
        embedding = self.decoder.embed_tokens
        if isinstance(embedding, VocabParallelEmbedding):
            return embedding.vocab_size
        return embedding.weight.shape[0]

    @property
    def num_logits(self) -> int:
        head = self.model.lm_head
        if type(head) is nn.Linear:
            return len(head.weight)
        number: int = getattr(head, "vocab_size" if isinstance(head, VocabParallelHead) else "out_features",
                              self.vocab_size)
        return number

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        config = self.config
        experts = getattr(config, "num_experts_per_tok", None) or 0
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        per_token = experts * (3 * inner // self.group.size + 2 * config.hidden_size)
        per_token *= self.kv_spec().compute_dtype.itemsize
        # Autocast copies what it casts; the copy of the head is the largest, and the last.
        cast = 0 if self.autocast is None else config.hidden_size * config.vocab_size * self.autocast.itemsize
        return super().step_bytes(num_tokens, num_rows) + num_tokens * per_token + cast

    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        wrapper = self._family.wrapper
        if wrapper is not None:
            yield "model", self.model.model, wrapper.body
        yield from ((part.name, part.module, part.expected) for part in self._parts() if part.expected is not None)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((p.name, p.module) for p in self._parts() if p.expected is None and not p.is_activation)

    def activations(self) -> tuple[type, ...]:
        return tuple({type(part.module): None for part in self._parts() if part.is_activation})

    def patched(self) -> str | None:
        return of_family(self._family).patched()

    def asked_of_model(self) -> frozenset[str]:
        return of_family(self._family).names(self.model_class)

    def replacement_reason(self, name: str, module: nn.Module) -> Reason | None:
        return replacement_reason(name, module, calls_modules=self.calls_modules)

    def function_kernels(self) -> list[tuple[str, int]]:
        return kernel_numbers(self._functions)

    def may_have_float_weight(self, module: nn.Module) -> bool:
        return self._family.casts_norms and type(module) in self._family.classes("norm")

    def constants_reason(self) -> Reason | None:
        if not self._layers():
            return Reason("the model has no layers", remedy=DISAGREE)
        reasons = (self._config_reason, self._layer_reason, self._code_reason, self.registry_reason,
                   self._experts_reason)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def hidden_states_of_modules(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Compute `hidden_states` by the decoder's own forward, with attention over the pages."""
        decoder = self.decoder
        # transformers passes a mask of four dims on as it is: it makes no mask and does not inspect the positions.
        no_mask = input_ids.new_empty((1, 1, 1, 1), dtype=torch.bool)
        rows = self.adapter_rows(step.adapters)
        with paged_call(self._configs()), self.casting(), by_row(self._lora, rows):
            output = decoder(
                input_ids=input_ids[None], attention_mask=no_mask, position_ids=step.positions[None], use_cache=False,
                output_attentions=False, output_hidden_states=False, output_router_logits=False, return_dict=True,
                **{STEP_ARGUMENT: WindowedStep(step, self.windows())},
            )
        result: torch.Tensor = output.last_hidden_state[0]
        return result if step.wanted is None else result[step.wanted]

    def casting(self) -> AbstractContextManager:
        """Return torch's autocast for modules that are called as they stand; a null context if the calls do not cast.

        Its cache of cast weights is off: weights cached without gradients would serve a caller's forward that needs
        gradients, and a graph would read cached weights after they were freed.
        """
        if self.autocast is None:
            return nullcontext()
        device = self.decoder.embed_tokens.weight.device.type
        return torch.autocast(device, self.autocast, cache_enabled=False)

    def _configs(self) -> list[Any]:
        """Return every config that the decoder or an attention module reads, each once."""
        modules = (self.decoder, *(layer.self_attn for layer in self._layers()))
        return list({id(module.config): module.config for module in modules}.values())

    def _layers(self) -> list[Any]:
        # A list first: slicing a ModuleList would register every layer again in every step.
        return list(self.decoder.layers)[: self.config.num_hidden_layers]

    def _parts(self) -> list[ModulePart]:
        return parts_of(self.model, self._family)

    def _config_reason(self) -> Reason | None:
        config, name = self.config, implementation_of(self.config)
        for part in self._parts():
            own = vars(part.module).get("config", config)
            if part.expected is not None and own is not config and _read_in_forwards(own) != _read_in_forwards(config):
                return Reason("{} has another config than the model", part.name, remedy=DISAGREE)
        if not getattr(config, "is_causal", True):
            return Reason("config.is_causal is False", remedy=DISAGREE)
        if getattr(config, "use_bidirectional_attention", None):
            return Reason("config.use_bidirectional_attention is set", remedy=DISAGREE)
        if self._family.beyond_sdpa is not None and not self._carries_all(name):
            return Reason("attention implementation {} leaves out {}, which pages would not", repr(name),
                          self._family.beyond_sdpa,
                          remedy='Load the model with `attn_implementation="eager"` or a FlashAttention one.')
        image_token = getattr(self.model.config, "image_token_id", None) if self._family.wrapper is not None else None
        if image_token is not None and image_token >= self.vocab_size:
            return Reason("image_token_id={} is outside the vocabulary, where stock puts another in its place",
                          image_token, remedy="`model.resize_token_embeddings(n)` gives the image token a vector.")
        if self.num_logits > self.vocab_size:
            return Reason("lm_head has {} rows, the embedding {}: a token may have no vector", self.num_logits,
                          self.vocab_size, remedy="`model.resize_token_embeddings(n)` changes both.")
        if len(getattr(config, "layer_types", None) or self._layers()) < len(self._layers()):
            return Reason("config.layer_types is shorter than the model", remedy=DISAGREE)
        return None

    def _carries_all(self, name: str | None) -> bool:
        """Return whether this implementation uses the arguments of attention that paged attention uses with it."""
        if name == "sdpa":
            return self._family.beyond_sdpa == "softcap" and self.model_class._supports_sdpa
        if name is None or name in ("eager", "flex_attention") or name.startswith("flash_attention"):
            return name is not None
        return ALL_ATTENTION_FUNCTIONS.get(name) is flash_attention_forward  # a kernel of the Hub

    def _layer_reason(self) -> Reason | None:
        spec = self.kv_spec()
        for i, layer in enumerate(self._layers()):
            attention = layer.self_attn
            if not attention.is_causal or attention.layer_idx != i:
                return Reason("layer {0}'s attention is not causal, or not layer {0}'s", i, remedy=DISAGREE)
            if attention.head_dim != spec.head_dim:
                return Reason("layer {} has head_dim={}, its config {}", i, attention.head_dim, spec.head_dim,
                              remedy=DISAGREE)
            if attention.num_key_value_groups * spec.num_kv_heads != spec.num_heads:
                return Reason("layer {} has {} query heads to a KV head, its config others", i,
                              attention.num_key_value_groups, remedy=DISAGREE)
            window = self._mask_window(i)
            if getattr(attention, "sliding_window", window) != window:
                return Reason("layer {} has sliding_window={}, its config {}", i, attention.sliding_window, window,
                              remedy=DISAGREE)
            if window is not None and window < 2:  # stock's cache then keeps all keys, and its masks follow the cache
                return Reason("layer {} has sliding_window={}: expected None or at least 2", i, window,
                              remedy="Set a window of at least two tokens, or None.")
        return None

    def _mask_window(self, layer: int) -> int | None:
        """Return the window of the mask that stock makes for this layer."""
        config, windows = self.config, self._family.windows
        if windows == "by layer":
            windows = "all" if config.layer_types[layer] == "sliding_attention" else "none"
        return config.sliding_window if windows == "all" else None

    def _code_reason(self) -> Reason | None:
        """Return why an activation, or a helper of a module (a norm's `_norm`), is not the class's own, or None."""
        methods: dict[type, frozenset[str]] = {}
        for name, module, expected, is_activation in self._parts():
            kind = type(module) if is_activation else expected
            if kind is None:
                continue
            kind = stock_class(kind)
            if kind not in methods:
                if is_activation and kind not in ELEMENTWISE:
                    return Reason("the activation {} is a {}.{}", name, kind.__module__, kind.__name__,
                                  remedy=PUT_BACK)
                if is_activation and (place := patched_class((kind,))) is not None:
                    return Reason("{} is patched", place, remedy=UNDO_PATCH)
                methods[kind] = frozenset(k for k, v in vars(kind).items() if isinstance(v, FunctionType))
            # Eligibility checks replaced forwards of all modules.
            if replaced := methods[kind].intersection(vars(module)) - {"forward"}:
                return Reason("{} of {} is replaced on the instance", min(replaced), name, remedy=UNDO_REPLACEMENT)
        return None

    def registry_reason(self) -> Reason | None:
        """Return why a function is neither original nor a Hub kernel, or experts are not transformers' own, or None.

        The original functions, Hub kernels and experts compute each token by itself; a user's may not.
        """
        for name, function in self._functions:
            if function._forward_hooks or function._forward_pre_hooks:
                return Reason("{} has a forward hook", name, remedy=REMOVE_HOOK)
            if (reason := self.replacement_reason(name, function)) is not None:
                return reason
        if "experts" not in self._family.parts:
            return None
        experts = self.config._experts_implementation
        entry = ALL_EXPERTS_FUNCTIONS.get(experts)
        if not (experts in (None, "eager") if entry is None else patched_entry(entry) is None):
            return Reason("experts implementation {} is not one of transformers' own", repr(experts),
                          remedy="Set one of transformers' own in the config.")
        return None

    def _experts_reason(self) -> Reason | None:
        """Return which expert weight lacks the model's dtype, in which experts get their inputs, or None."""
        if "experts" not in self._family.parts:
            return None
        dtype: torch.dtype = self.kv_spec().compute_dtype
        kinds = self._family.classes("experts")
        for path, module, expected in self.own_modules():
            if stock_class(expected) in kinds:
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype != dtype:
                        return Reason("mixed dtypes: {}.{} is {}, the embedding {}", path, key, parameter.dtype, dtype,
                                      remedy=ONE_DTYPE)
        return None


def _read_in_forwards(config: Any) -> list[Any]:
    return [implementation_of(config), *(repr(getattr(config, name, None)) for name in CONFIG_CONSTANTS)]


def plain_values(module: nn.Module) -> list[tuple[str, Any]]:
    """Return numbers and names that a module keeps as attributes, in its order, without train mode."""
    return [(k, v) for k, v in vars(module).items() if type(v) in _PLAIN and k != "training" and k[0] != "_"]


_PLAIN = frozenset({bool, int, float, str})
