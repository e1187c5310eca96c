"""Any family of `families.py`: its stock modules on packed tokens [1, T], with attention over the pages.

Nothing of the model is replaced: the decoder's own forward runs, and its attention modules find `paged_calls`' function
in their config. So what a family computes besides attention need not be known here, only that it looks at each token
alone, which is so for transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_paged.integration.models.activations import ELEMENTWISE
from hf_paged.integration.models.adapter import KVSpec, ModelAdapter, StepContext
from hf_paged.integration.models.families import Family
from hf_paged.integration.models.own_code import is_own_code
from hf_paged.integration.models.paged_calls import STEP_ARGUMENT, implementation_of, paged_call
from hf_paged.integration.models.rope import longest_unchanged

# Of the config, what forwards read while they run.
CONFIG_CONSTANTS = (
    "num_hidden_layers", "num_attention_heads", "sliding_window", "layer_types", "final_logit_softcapping", "is_causal",
    "use_bidirectional_attention", "_experts_implementation",
)  # fmt: skip
PLAIN_VALUES = frozenset({bool, int, float, str, type(None)})


class GenericAdapter(ModelAdapter):
    """Runs the decoder of one family as it stands; there are no weights to merge and no ops to fuse."""

    def __init__(self, model: PreTrainedModel, *, family: Family, **techniques: bool) -> None:
        super().__init__(model, getattr(family.modeling, family.model_name), **techniques)
        self._family = family

    def kv_spec(self) -> KVSpec:
        config, weight = self.model.config, self.model.model.embed_tokens.weight
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KVSpec(len(self._layers()), config.num_key_value_heads, head_dim, weight.dtype, weight.device)

    def max_length(self) -> int:
        return longest_unchanged(self.model.config)

    def prepare(self, max_model_len: int) -> None:
        """Nothing is kept besides the modules."""

    def is_current(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing is kept besides the modules."""

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        decoder = self.model.model
        # A mask of four dims is passed on as it is: no mask is made, and nothing is looked up in the positions.
        no_mask = input_ids.new_empty((1, 1, 1, 1), dtype=torch.bool)
        with paged_call(self._configs()):
            output = decoder(
                input_ids=input_ids[None], attention_mask=no_mask, position_ids=step.positions[None], use_cache=False,
                output_attentions=False, output_hidden_states=False, output_router_logits=False, return_dict=True,
                **{STEP_ARGUMENT: step},
            )  # fmt: skip
        result: torch.Tensor = output.last_hidden_state[0]
        return result

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(hidden_states[None])[0]
        cap = self.model.config.final_logit_softcapping if self._family.caps_logits else None
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        return ((name, module, expected) for name, module, expected in self._parts() if expected is not None)

    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module, expected in self._parts() if expected is None)

    def replaced_functions(self) -> Iterator[tuple[Any, Any]]:
        """The functions of the modeling file stand for themselves: only whether they are own code is asked."""
        return ((function, function) for function in self._family.functions())

    def constants(self) -> tuple:
        config = self.model.config
        modules = [
            [(key, value) for key, value in vars(module).items() if type(value) in PLAIN_VALUES and key != "training"]
            for _, module, _ in self.own_modules()
        ]
        activations = [type(activation).__qualname__ for activation in self._activations()]
        return [repr(getattr(config, name, None)) for name in CONFIG_CONSTANTS], activations, modules

    def constants_reason(self) -> str | None:
        if not self._layers():
            return "the model has no layers"
        reasons = (self._code_reason, self._config_reason, self._layer_reason, self._experts_reason)
        return next((reason for check in reasons if (reason := check()) is not None), None)

    def may_have_float_weight(self, module: nn.Module) -> bool:
        return self._family.casts_norms and type(module) in self._family.classes("norm")

    @property
    def vocab_size(self) -> int:
        return self.model.model.embed_tokens.weight.shape[0]

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        config = self.model.config
        experts = getattr(config, "num_experts_per_tok", None) or 0
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * self.kv_spec().head_dim
        per_token = (heads + experts * (3 * inner + 2 * config.hidden_size)) * self.kv_spec().dtype.itemsize
        return super().step_bytes(num_tokens, num_rows) + num_tokens * per_token

    # -- what is in the model -----------------------------------------------------------------------------------------

    def _layers(self) -> list[Any]:
        # A list first: a slice of a ModuleList registers every layer again, in every step.
        return list(self.model.model.layers)[: self.model.config.num_hidden_layers]

    def _configs(self) -> list[Any]:
        """Every config that the decoder or an attention module looks into, each once."""
        modules = (self.model.model, *(layer.self_attn for layer in self._layers()))
        return list({id(module.config): module.config for module in modules}.values())

    def _activations(self) -> list[nn.Module]:
        """Every activation module, in the order of the modules that call one."""
        found = (_activation(module) for module in self.model.model.modules())
        return [activation for activation in found if activation is not None]

    def _parts(self) -> Iterator[tuple[str, nn.Module, type | None]]:
        """(name, module, class that has to stand there or None: a layer that is called) of all of the model."""
        classes = {part: self._family.classes(part) for part in self._family.parts}
        return _walk("", self.model, classes)

    # -- what would not be computed as in stock -----------------------------------------------------------------------

    def _code_reason(self) -> str | None:
        """Helpers besides `forward` (a norm's `_norm`, a gate's `_apply_gate`) are own code, too."""
        known: set[type] = set()
        for name, module, expected in self.own_modules():
            if expected not in known:
                known.add(expected)
                patched = [key for key, value in vars(expected).items()
                           if isinstance(value, FunctionType) and not is_own_code(value)]  # fmt: skip
                if patched:
                    return f"{expected.__name__}.{patched[0]} is patched"
            if replaced := sorted(vars(module).keys() & _methods(expected)):
                return f"{replaced[0]} of {name} is replaced on the instance"
        for kind in set(map(type, self._activations())):
            if kind not in ELEMENTWISE or not is_own_code(kind.forward):
                return f"an activation is a {kind.__module__}.{kind.__name__}"
        return None

    def _config_reason(self) -> str | None:
        config, name = self.model.config, implementation_of(self.model.config)
        if not getattr(config, "is_causal", True):
            return "config.is_causal is False"
        if getattr(config, "use_bidirectional_attention", None):
            return "config.use_bidirectional_attention is set"
        if self._family.beyond_sdpa is not None and name not in (None, "eager", "flex_attention") and (
            not name.startswith("flash_attention")
        ):
            return f"attention implementation {name!r} leaves out {self._family.beyond_sdpa}, which pages would not"
        if len(getattr(config, "layer_types", None) or self._layers()) < len(self._layers()):
            return "config.layer_types is shorter than the model"
        return None

    def _layer_reason(self) -> str | None:
        config, spec = self.model.config, self.kv_spec()
        for i, layer in enumerate(self._layers()):
            attention = layer.self_attn
            if not attention.is_causal or attention.layer_idx != i:
                return f"layer {i}'s attention is not causal, or not layer {i}'s"
            if attention.head_dim != spec.head_dim:
                return f"layer {i} has head_dim={attention.head_dim}, its config {spec.head_dim}"
            if attention.num_key_value_groups * spec.num_kv_heads != config.num_attention_heads:
                return f"layer {i} has {attention.num_key_value_groups} query heads to a KV head, its config others"
            window = self._mask_window(i)
            if getattr(attention, "sliding_window", window) != window:
                return f"layer {i} has sliding_window={attention.sliding_window}, its config {window}"
        return None

    def _mask_window(self, layer: int) -> int | None:
        """The window of the mask that stock makes for this layer."""
        config, windows = self.model.config, self._family.windows
        if windows == "by layer":
            windows = "all" if config.layer_types[layer] == "sliding_attention" else "none"
        return config.sliding_window if windows == "all" else None

    def _experts_reason(self) -> str | None:
        """Experts compute one token at a time in all of transformers' implementations; a user's may not."""
        if "experts" not in self._family.parts:
            return None
        name = self.model.config._experts_implementation
        function = ALL_EXPERTS_FUNCTIONS.get(name)
        if not (name in (None, "eager") if function is None else is_own_code(function)):
            return f"experts implementation {name!r} is not one of transformers' own"
        dtype = self.kv_spec().dtype
        for path, module, expected in self.own_modules():
            if expected in self._family.classes("experts"):
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype != dtype:
                        return f"mixed dtypes: {path}.{key} is {parameter.dtype}, the embedding {dtype}"
        return None


def _walk(path: str, module: nn.Module,
          classes: dict[str, tuple[type, ...]]) -> Iterator[tuple[str, nn.Module, type | None]]:  # fmt: skip
    for key, child in module.named_children():
        name = f"{path}.{key}" if path else key
        if key == "layers" and type(child) is nn.ModuleList:
            for i, layer in child.named_children():
                yield from _part(f"{name}.{i}", layer, classes["layers"], classes)
        elif key in classes:
            yield from _part(name, child, classes[key], classes)
        elif type(child) is nn.Dropout:
            yield name, child, nn.Dropout
        elif child is not _activation(module):
            yield name, child, None


def _part(name: str, module: nn.Module, allowed: tuple[type, ...],
          classes: dict[str, tuple[type, ...]]) -> Iterator[tuple[str, nn.Module, type | None]]:  # fmt: skip
    if type(module) not in allowed:
        yield name, module, allowed[0]
        return
    yield name, module, type(module)
    yield from _walk(name, module, classes)


def _activation(module: Any) -> nn.Module | None:
    found = module._modules
    return found.get("act_fn", found.get("activation_fn"))


def _methods(cls: type) -> frozenset[str]:
    return frozenset(key for key, value in vars(cls).items() if isinstance(value, FunctionType)) - {"forward"}
