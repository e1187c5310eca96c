"""Executor of any class: a model's modules on packed tokens, its adapters, and what it was when it was read.

`ModelExecutor` runs stock modules on packed tokens [1, T], with attention over the pages. Nothing of the model is
replaced: the decoder's own forward runs, and its attention modules find `paged_calls`' function in their config. So
this file need not know what a class computes besides attention, only that it computes each token by itself, as
transformers' own classes do. Subclasses say which shapes, windows and modules a model has: `FusedExecutor` for
fused families, `DerivedExecutor` for what a recorded forward showed.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import repeat
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from hf_paged.errors import Reason
from hf_paged.guards.hints import ENABLE_AGAIN, ONE_DTYPE, REMOVE_HOOK, UNDO_REPLACEMENT
from hf_paged.guards.hooks import names_in_force
from hf_paged.guards.model_watch import ModelTensors, ModelWatch
from hf_paged.guards.original_classes import of_class, patched_entry
from hf_paged.guards.original_code import OriginalCode
from hf_paged.guards.replaced_forwards import autocast_of_call, functions_of, kernel_numbers, why_not_replaced
from hf_paged.guards.tokenwise import quantization_state, stores_float8
from hf_paged.models.base import AttentionMask, KVSpec, RoutesShape, StepContext
from hf_paged.models.expert_lora.folding import folded_bytes, folded_forward, folded_layers, outermost_wrappers
from hf_paged.models.paged_calls import paged_call, running
from hf_paged.models.recurrent.view import StateView, cache_argument
from hf_paged.models.routing.record import RouteRecorder, routers_of, shape_of
from hf_paged.models.tuners import (
    BASE,
    AdapterRows,
    adapter_state,
    by_row,
    is_adapted,
    layers_within,
    states_by_adapter,
    why_not_row,
)
from hf_paged.parallel.group import ParallelGroup, group_of
from hf_paged.parallel.layers import SHARDED_LAYERS, ShardedEmbedding, VocabParallelHead
from hf_paged.parallel.replica import replica_of

# Layers whose code eligibility requires to be torch's, transformers' or hf_paged's own.
KNOWN_LAYERS = (nn.Linear, nn.Embedding, Conv1D, *SHARDED_LAYERS)
_UNREAD = {"_name_or_path", "architectures", "dtype", "tie_word_embeddings", "transformers_version"}
_PLAIN = frozenset({bool, int, float, str})
# Arguments with which a forward makes its hidden states and nothing else, whatever the config says.
_QUIET = {
    "use_cache": False, "output_attentions": False, "output_hidden_states": False, "output_router_logits": False,
}


class ModelReadings:
    """Values read off a model's modules, valid for one number of its structure (`ModelWatch`). Keeps no tensor alive.

    ``state``: constants, active adapters and settings of quantized layers, as text. ``called_kinds``: classes of the
    layers that are called as they stand, without torch's. ``dtypes``: dtypes of floating-point parameters.
    ``adapters``: by name of an adapter, the state for rows under it in place of ``state``. ``passed``: under which
    autocast eligibility found nothing against the model, and classes whose code it compares anew; None: it has not yet.
    """

    def __init__(self, executor: ModelExecutor, structure: int) -> None:
        model = executor.model
        modules = list(model.named_modules())
        constants = repr((executor.constants(), kernel_numbers(modules), quantization_state(modules)))
        kinds = {type(inner): None for _, module in executor.called_modules() for inner in module.modules()}
        adapted = [(path, module) for path, module in modules if is_adapted(module)]
        self.structure = structure
        self.state = f"{constants}{adapter_state(model)}"
        self.called_kinds: tuple[type, ...] = tuple(kind for kind in kinds if kind not in KNOWN_LAYERS)
        self.dtypes = frozenset(p.dtype for p in model.parameters() if p.is_floating_point())
        self._adapted = [(path, weakref.ref(layer)) for path, layer in adapted]
        states = states_by_adapter(adapted) if adapted else {}
        self.adapters = {name: f"{constants}{of_it}" for name, of_it in states.items()}
        self.adapter_names = tuple(name for name in self.adapters if name != BASE)
        self.passed: tuple[tuple[type, ...], torch.dtype | None] | None = None

    def adapted_layers(self) -> list[tuple[str, Any]]:
        """Return the model's layers with adapters, with their paths."""
        return [(path, layer) for path, reference in self._adapted if (layer := reference()) is not None]


class ModelExecutor(ABC):
    """Executor that runs a model's modules on packed tokens as they stand. Does not keep the model alive.

    It makes no copies of weights, merges none and fuses no ops; `FusedExecutor` does.

    Args:
        model_class: transformers' own class, which the model's class is or derives from.
        modeling: module of the decoder's classes.
        routed_experts: as in `PagedConfig`.

    Raises:
        ValueError: ``routed_experts`` for a model whose routes are not recorded.
    """

    calls_modules = True  # whether all modules run as they stand, on packed tokens
    has_states = False  # whether layers keep a recurrent state of each sequence (`models/recurrent`)
    whole_prompts = False  # whether layers take no state into a further chunk of a prompt
    least_chunk = 1  # tokens of a prompt's forward behind a state; of fewer, layers may compute something else
    packs_prompts = False  # whether several prompts with states may lie one behind the other in one forward
    inner_decoder: str | None = None  # path of the decoder below `body` that takes vectors, of image-text models
    has_experts = True  # whether forwards may look up an implementation of experts

    def __init__(self, model: PreTrainedModel, model_class: Any, modeling: ModuleType, *,
                 routed_experts: bool = False) -> None:
        self._source = weakref.ref(model)
        self.replica = replica_of(model)
        self.model_class = model_class
        # Dtype to which the running calls cast (see `autocast_of_call`). It may change only while no call runs: copies
        # of weights, the pool's dtype and the prefix cache's key depend on it.
        self.autocast: torch.dtype | None = None
        self._look: ModelReadings | None = None
        self._row_names: tuple[str, ...] = ()
        self._adapted: list[weakref.ref] = []
        self._wrapped: list[str] = []  # paths below the decoder of experts with LoRA on their weights
        self.watch = ModelWatch()
        self._functions = functions_of(modeling)
        self.original_code()  # record it now, before code patches the enabled model
        self.routes: RoutesShape | None = None  # None: they are not recorded
        self._routers: tuple[str, ...] = ()  # paths below the decoder
        if routed_experts:
            self._find_routers()

    # -- the model --------------------------------------------------------------------------------------------------

    @property
    def source(self) -> Any:
        """The user's model; RuntimeError once it was garbage-collected."""
        model = self._source()
        if model is None:
            raise RuntimeError("the model of this engine was garbage-collected")
        return model

    @property
    def has_source(self) -> bool:
        """Whether the user's model is still alive."""
        return self._source() is not None

    @property
    def model(self) -> Any:
        """The model whose modules run: the user's, or a sharded one's replica; RuntimeError if it was collected."""
        return self.source if self.replica is None else self.replica.model

    @property
    def group(self) -> ParallelGroup:
        """The ranks that hold the model together."""
        return group_of(self.model)

    @property
    def may_repeat(self) -> bool:
        """Whether a step that was broken off may run again: no rank waits in it, and it has changed no states."""
        return not (self.group.is_parallel or self.has_states)

    def finds_shards(self) -> bool:
        """Return whether the model was sharded since the last check; then its replica runs from now on."""
        if self.replica is not None:
            return False
        self.replica = replica_of(self.source)
        return self.replica is not None

    def autocast_of_call(self) -> torch.dtype | None:
        """Return the dtype to which a call made now casts; None without autocast, or if all weights have it."""
        cast = autocast_of_call(self.source)
        return None if cast is None or self.look().dtypes == {cast} else cast

    # -- what a subclass knows of the model -------------------------------------------------------------------------

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """Module that makes final hidden states from tokens."""

    @property
    @abstractmethod
    def body(self) -> str:
        """Path of the module from whose output the class's forward makes logits."""

    @property
    def head(self) -> Any:
        """Layer that makes logits, or None: not every class gives it."""
        return self.model.get_output_embeddings()

    @property
    @abstractmethod
    def config(self) -> Any:
        """The config that the decoder's modules read: of an image-text model the text config."""

    @abstractmethod
    def attention_configs(self) -> list[Any]:
        """Return every config in which an attention module looks its implementation up, each once."""

    @abstractmethod
    def kv_spec(self) -> KVSpec:
        """Return shapes, dtypes and device of this rank's cache."""

    @abstractmethod
    def masks(self) -> tuple[AttentionMask, ...]:
        """Return, for every attention call of a forward, which positions it reads."""

    @property
    def has_stock_cache(self) -> bool:
        """Whether stock's cache holds the keys and values that attention gets, as pages do (not latents of them)."""
        return True

    def windows(self) -> tuple[int | None, ...]:
        """Return, for every attention call of a forward, how many last positions a token reads at most; None: all."""
        return tuple(mask.most for mask in self.masks())

    @abstractmethod
    def max_length(self, asked: int | None = None) -> int:
        """Return the longest sequence in tokens: `asked` (None: the number of the model's positions), as far as packed
        steps compute what stock computes."""

    def why_limited(self, length: int, max_new_tokens: int) -> Reason:
        """Return the reason why a sequence of `length` tokens, which is beyond `max_length`, is left to stock."""
        return Reason("{} tokens with {} new ones, and beyond {} the model's frequencies depend on the longest row of "
                      "a batch", length, max_new_tokens, self.max_length(length),
                      remedy="Ask for fewer tokens, or configure a `rope_type` that is the same at all lengths (yarn, "
                             "for instance).")

    @property
    def max_step_tokens(self) -> int | None:
        """Number of tokens up to which a step computes what stock computes; None: any number."""
        return None

    @property
    def vocab_size(self) -> int:
        """Number of tokens: rows of the embedding, over all ranks and without padding."""
        embedding = self.model.get_input_embeddings()
        size: int = embedding.vocab_size if isinstance(embedding, ShardedEmbedding) else len(embedding.weight)
        return size

    @property
    def hidden_size(self) -> int:
        """Number of columns of hidden states."""
        size: int = self.model.get_input_embeddings().weight.shape[1]
        return size

    @property
    @abstractmethod
    def num_logits(self) -> int:
        """Number of logits of a token: columns of the head, over all ranks and without padding."""

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Return an upper estimate of a step's bytes: hidden states, the MLP's inputs, fp32 logits and their copies."""
        hidden = self.hidden_size
        of_sums = folded_layers(self.decoder)
        widest = max([hidden, *(_width(module) for module in self.decoder.modules() if module not in of_sums)])
        experts = getattr(self.config, "num_experts_per_tok", None) or 1
        per_token = 8 * hidden + experts * (3 * widest + 2 * hidden)
        # Autocast copies what it casts; the copy of the head is the largest, and the last.
        cast = 0 if self.autocast is None else hidden * self.num_logits * self.autocast.itemsize
        itemsize = self.kv_spec().compute_dtype.itemsize
        own = num_tokens * per_token * itemsize + num_rows * self.num_logits * 4 * 4 + cast
        return own + folded_bytes(self.decoder)

    @abstractmethod
    def original_code(self) -> OriginalCode:
        """Return the originals of all classes that the model may contain."""

    @abstractmethod
    def own_modules(self) -> Iterator[tuple[str, nn.Module, type]]:
        """Yield (name, module, expected class) of every module whose forward is the class's own."""

    @abstractmethod
    def called_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) of every other layer: it is called as it stands, on packed tokens."""

    @abstractmethod
    def constants(self) -> tuple:
        """Return numbers and names that the code reads besides tensors: part of the keys of prefix cache and graphs."""

    @abstractmethod
    def why_not_constants(self) -> Reason | None:
        """Return why the model cannot run with the present constants, or None."""

    def why_not_registry(self) -> Reason | None:
        """Return why a function is neither original nor a Hub kernel, or experts are not transformers' own, or None.

        The original functions, Hub kernels and experts compute each token by itself; a user's may not.
        """
        for name, function in self._functions:
            if function._forward_hooks or function._forward_pre_hooks:
                return Reason("{} has a forward hook", name, remedy=REMOVE_HOOK)
            if (reason := why_not_replaced(name, function, calls_modules=self.calls_modules)) is not None:
                return reason
        if not self.has_experts:
            return None
        experts = self.config._experts_implementation
        entry = ALL_EXPERTS_FUNCTIONS.get(experts)
        if not (experts in (None, "eager") if entry is None else patched_entry(entry) is None):
            return Reason("experts implementation {} is not one of transformers' own", repr(experts),
                          remedy="Set one of transformers' own in the config.")
        return None

    def why_not_precision(self, autocast: torch.dtype | None) -> Reason | None:
        """Return why the model does not compute each row alone, or at all, under this autocast (None: it casts
        nothing) and with weights of the present dtypes, or None."""
        own, dtype = list(self.own_modules()), self.kv_spec().compute_dtype
        # Weights of experts, which get the model's dtype under autocast, too.
        weights: list[tuple[str, torch.Tensor]] = [
            (f"{name}.{key}", weight) for name, module, _ in own
            for key, weight in module.named_parameters(recurse=False) if key != "weight"]
        if autocast is None:
            modules = (*((name, module) for name, module, _ in own), *self.called_modules())
            weights += [(name, weight) for name, module in modules for weight in float_weights(module)]
        return next((Reason("mixed dtypes: {} is {}, the embedding {}", name, weight.dtype, dtype, remedy=ONE_DTYPE)
                     for name, weight in weights if weight.dtype != dtype), None)

    def why_not_instance(self) -> Reason | None:
        """Return which function of a module of its own is replaced on the instance, or None."""
        for path, module, _ in self.own_modules():
            # Eligibility checks replaced forwards of all modules.
            kind = type(module)
            if replaced := [k for k in vars(module) if k != "forward" and callable(getattr(kind, k, None))]:
                return Reason("{} of {} is replaced on the instance", min(replaced), path, remedy=UNDO_REPLACEMENT)
        return None

    def _find_routers(self) -> None:
        routers, name = routers_of(self.decoder), self.model_class.__name__
        if self.has_states or self.group.is_parallel:
            what = "over several ranks" if self.group.is_parallel else "with recurrent states"
            raise ValueError(f"routed_experts=True: routes of {name} {what} are not recorded; expected False")
        self.routes = shape_of(routers)
        if self.routes is None:
            found = "unlike routers" if routers else "no router of experts"
            raise ValueError(f"routed_experts=True: {name} has {found}; expected False")
        self._routers = tuple(routers)

    def why_not_routes(self) -> Reason | None:
        """Return why the routes of a step would not fit the pool, or None."""
        if self.routes is None or shape_of(routers_of(self.decoder)) == self.routes:
            return None
        return Reason("routers that choose other numbers of experts than when the model was enabled",
                      remedy=ENABLE_AGAIN)

    def route_recorders(self, step: StepContext) -> Iterator[Callable[[torch.Tensor], None] | None]:
        """Return, for each layer with a router in order, what takes the experts of a step's tokens; Nones without."""
        if self.routes is None:
            return repeat(None)
        return map(RouteRecorder(step).of_layer, range(self.routes.num_layers))

    # -- what is made of the weights --------------------------------------------------------------------------------

    def prepare(self, max_model_len: int) -> None:  # noqa: B027
        """Make or renew what layers need besides modules (merged weights, RoPE), before an idle engine gets busy."""

    def refresh(self, checksum: torch.Tensor | None) -> None:  # noqa: B027
        """Enqueue the renewal of copies of weights, if there are any (see `CopiedWeights.refresh`), after `prepare`."""

    def is_current(self) -> bool:
        """Return False if `prepare` would change what the layers compute."""
        return True

    @property
    def has_unmerged(self) -> bool:
        """Whether `prepare` may merge weights that are not merged yet: of plain layers, unlike quantized ones."""
        return False

    def copies_are_stale(self) -> bool:
        """Return whether addresses and version counters show that weights changed since their copies were made."""
        return False

    @property
    def has_copies(self) -> bool:
        """Whether there are copies of weights, which `refresh` has to renew."""
        return False

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of weights that are held now."""
        return 0

    def bytes_to_come(self) -> int:
        """Return the bytes of copies of weights that `prepare` would add now."""
        return 0

    def own_tensors(self) -> list[torch.Tensor]:
        """Return tensors besides the modules' that steps read and that other tensors may replace."""
        return []

    def may_use_one_launch(self, rows: int, lengths: np.ndarray) -> bool:
        """Return whether one launch may compute the layers of a step of so many decode rows, padding included, if no
        row reads what another row writes. ``lengths``: tokens of the real rows that the cache holds."""
        return False

    def uses_one_launch(self, rows: int) -> bool:
        """Return whether one launch would compute a step of so many rows now; its kernel may still be compiling."""
        return False

    def captured_tensors(self) -> list[torch.Tensor]:
        """Return further tensors that graphs captured since the last call read, and that have to live as long."""
        return []

    def drop_references(self) -> None:
        """Release modules and parameters' memory until `prepare`; tables that graphs read stay at their addresses."""
        self.watch.release_modules()

    def release(self) -> None:
        """Release everything that `prepare` made; every parameter has memory of its own afterwards."""
        self.drop_references()

    def why_not_experts(self, device: torch.device) -> str | None:
        """Return why experts would run by transformers' modules on a device; None if there are none, too."""
        return None

    # -- a step -----------------------------------------------------------------------------------------------------

    def body_of_step(self, step: StepContext, forwards: Mapping[str, Callable[..., Any]]) -> nn.Module:
        """Return the decoder, or a view of it, whose forward computes a step: modules at some paths run these
        `forwards`, experts that are wrapped theirs on the sums, and routers record routes."""
        decoder: nn.Module = self.decoder
        forwards = {**self._folded_forwards(), **forwards}
        if self.routes is not None:
            routers = {path: decoder.get_submodule(path) for path in self._routers}
            forwards = RouteRecorder(step).forwards(routers, forwards)
        return view_of(decoder, forwards) if forwards else decoder

    def left_out(self) -> Mapping[str, Callable[..., Any]]:
        """Return forwards in place of layers that dry runs leave out, with all kernels inside of them, by path below
        the decoder."""
        return {}

    def _folded_forwards(self) -> dict[str, Callable[..., Any]]:
        """Return forwards for experts with LoRA on their weights, by path below the decoder."""
        found = ((path, self.decoder.get_submodule(path)) for path in self._wrapped)
        return {path: folded_forward(experts) for path, experts in found}

    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Compute final normed hidden states [T, hidden_size], or [W, hidden_size] of `wanted` tokens, from ids [T]."""
        rows = self.adapter_rows(step.adapters)
        with (paged_call(self.attention_configs()), running(step, self.masks()), self._casting(),
              by_row(self._adapted, rows)):
            result = final_states(self.body_of_step(step, {}), input_ids, step.positions)
        return result if step.wanted is None else result[step.wanted]

    def logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits [R, vocab_size] of [R, hidden_size], on every rank; ``adapters`` [R]: as in `StepContext`."""
        head, columns = self.head, self.shard_logits(hidden_states, adapters)
        return head.gathered(columns) if type(head) is VocabParallelHead else columns

    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Compute this rank's columns [R, rows] of the logits (`VocabParallelHead`); with one rank all columns."""
        with self._casting(), by_row(self._adapted, self.adapter_rows(adapters)):
            return class_logits(self.model, self.model_class, self.body, hidden_states)

    def _casting(self) -> AbstractContextManager:
        """Return torch's autocast for modules that are called as they stand; a null context if the calls do not cast.

        Its cache of cast weights is off: weights cached without gradients would serve a caller's forward that needs
        gradients, and a graph would read cached weights after they were freed.
        """
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.kv_spec().device.type, self.autocast, cache_enabled=False)

    # -- what the model was when it was read ------------------------------------------------------------------------

    def contents(self) -> int:
        """Return the number of the values of the model's weights (`ModelWatch`)."""
        return self.watch.contents(self.model)

    def tensors(self) -> ModelTensors:
        """Return the model's tensors as they are now."""
        return self.watch.tensors(self.model)

    def last_look(self, structure: int | None = None) -> ModelReadings | None:
        """Return what was last read off the modules if it was for this number of their structure (None: the present
        one), else None."""
        structure, look = self.watch.structure(self.model) if structure is None else structure, self._look
        return look if look is not None and look.structure == structure else None

    def look(self, structure: int | None = None) -> ModelReadings:
        """Return `last_look`, or read the modules anew."""
        structure = self.watch.structure(self.model) if structure is None else structure
        if (look := self.last_look(structure)) is None:
            self._look = look = ModelReadings(self, structure)
        return look

    def state_key(self, adapter: str | None = None, *, compares_tensors: bool = True) -> bytes:
        """Return a digest of what a forward depends on besides tensors: constants, adapters, code of called modules.

        Args:
            adapter: adapter that rows name; None: the active ones. No two names, and no name and the active adapters,
                have a key in common. A name that the model lacks has a key of its own as well.
            compares_tensors: False leaves out of the comparison with the last look what the digest does not depend on.
        """
        look = self._look
        if compares_tensors or look is None or not self.watch.holds_but_for_tensors(self.model, look.structure):
            look = self.look()
        versions = [(kind.__qualname__, of_class(kind).version()) for kind in look.called_kinds]
        state = look.state if adapter is None else look.adapters.get(adapter)
        functions = kernel_numbers(self._functions)
        digest = xxhash.xxh3_128_digest(f"{state}{versions}{functions}{self.autocast}".encode())
        if adapter is None:
            return digest
        return digest + hashlib.sha256(b"adapter:" + adapter.encode("utf-8", "surrogatepass")).digest()

    # -- adapters ---------------------------------------------------------------------------------------------------

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that rows can use, sorted: entries 1, 2, ... of `StepContext.adapters`."""
        return self.look().adapter_names

    def name_rows(self) -> tuple[str, ...]:
        """Let `StepContext.adapters` count the present `adapter_names` from now on, and return these names."""
        look = self.look()
        self._row_names, self._adapted = look.adapter_names, [weakref.ref(one) for _, one in look.adapted_layers()]
        wrapped = outermost_wrappers(look.adapted_layers())
        self._wrapped = [path.removeprefix(f"{self.body}.") for path, _ in wrapped]
        return self._row_names

    def adapter_rows(self, adapters: torch.Tensor | None) -> AdapterRows | None:
        """Return `StepContext.adapters` with their names, as layers take it."""
        return None if adapters is None else AdapterRows(adapters, self._row_names)

    def why_not_adapter(self, name: str) -> Reason | None:
        """Return why no row can run under this adapter (or `BASE`) beside rows of other adapters now, or None."""
        look = self.look()
        if name == BASE and not look.adapters:  # the model is its own base
            return None
        if name != BASE and name not in look.adapters:
            found = ", ".join(map(repr, (*look.adapter_names, BASE)))
            return Reason("the model has no adapter {}: expected one of {}", repr(name), found,
                          remedy="Load it with `load_adapter` of the PagedGenerator, the Engine or the PeftModel.")
        return why_not_row(look.adapted_layers(), name)

    def adapters_in_force(self) -> list[str] | Reason | None:
        """Return the adapters that PEFT's hooks give the rows of a forward now, by row; None without hooks.

        The layers come from the last look, with which `unsupported_reason` has just compared the modules.
        """
        look = self._look or self.look()
        if not look.adapters:
            return None
        if self.replica is not None:  # PEFT puts its hooks on the user's model
            return names_in_force([layer for layer in self.source.modules() if is_adapted(layer)])
        return names_in_force([layer for _, layer in look.adapted_layers()])


def float_weights(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of a layer, or of those that a tuner's layer stands for, whose dtype is computed in."""
    for layer in layers_within(module):
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and not stores_float8(layer, weight) and weight.is_floating_point():
            yield weight


def _width(layer: nn.Module) -> int:
    """Return the number of columns of a layer's result, or of what experts hold of a token; 0 of other modules."""
    if isinstance(layer, Conv1D):
        return layer.nf
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return max((max(weight.shape[1:]) for name, weight in layer.named_parameters(recurse=False)
                if weight.dim() == 3 and "gate_up" not in name), default=0)


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a config, but for those that no forward of a layer reads."""
    return {name: value for name, value in vars(config).items() if name not in _UNREAD}


def plain_values(module: nn.Module) -> list[tuple[str, Any]]:
    """Return numbers and names that a module keeps as attributes, in its order, without train mode."""
    return [(k, v) for k, v in vars(module).items() if type(v) in _PLAIN and k != "training" and k[0] != "_"]


class _Output(BaseModelOutputWithPast):
    """The output of a decoder of any class: what is no hidden state is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def final_states(body: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor,
                 states: StateView | None = None) -> torch.Tensor:
    """Compute final hidden states [T, hidden_size] of packed tokens [T] by the forward of a model's body.

    ``states``: of rows that have as many tokens each; None for a body that keeps none.
    """
    rows = 1 if states is None else states.num_rows
    if states is None:
        # transformers passes a mask of four dims on as it is: it makes no mask and does not inspect the positions.
        options: dict[str, Any] = {"attention_mask": input_ids.new_empty((1, 1, 1, 1), dtype=torch.bool)}
    else:  # with a cache, it does not inspect them either
        options = {str(cache_argument(type(body).forward)): states, "use_cache": True}
    result: torch.Tensor = body(**_accepted(
        type(body), input_ids=input_ids.view(rows, -1), position_ids=positions.view(rows, -1), return_dict=True,
        **_QUIET | options,
    )).last_hidden_state
    return result.flatten(0, 1)


def class_logits(model: Any, kind: type[nn.Module], body: str, hidden: torch.Tensor) -> torch.Tensor:
    """Compute logits [R, V] from final hidden states [R, hidden_size] by `kind.forward`; of a model that is cut over
    ranks, this rank's columns.

    Classes scale, cap, norm or project behind their decoder, in code of their own. It runs over a view of the model, in
    which the decoder returns the hidden states: the model itself is not touched, and other threads may call it.

    Args:
        model: the causal LM, of class `kind` or of a class derived from it.
        body: path of the module whose output `kind.forward` takes the hidden states from.
    """
    output = _Output(last_hidden_state=hidden[None])
    forwards: dict[str, Callable[..., Any]] = {body: lambda *args, **kwargs: output}
    head = model.get_output_embeddings()
    if type(head) is VocabParallelHead:
        forwards[next(name for name, module in model.named_children() if module is head)] = head.own_columns
    forward: Any = kind.forward
    # Gemma 4 compares the number of hidden states with that of the inputs.
    arguments = _accepted(kind, inputs_embeds=output.last_hidden_state, return_dict=True, **_QUIET)
    logits: torch.Tensor = forward(view_of(model, forwards), **arguments).logits[0]
    return logits


class OnView(NamedTuple):
    """A forward for `view_of` whose first argument is the view, by which it reaches the views of submodules."""

    function: Callable[..., Any]


def view_of(module: nn.Module, forwards: Mapping[str, Callable[..., Any] | OnView]) -> nn.Module:
    """Return a view of a module, in which the submodules at some paths ("": the module itself) run other forwards.

    The view, and views of modules between it and those, run their classes' own forwards: one on an instance is bound to
    the module itself. What a forward sets on a view is not set on the module.
    """
    view, inside = object.__new__(type(module)), dict[str, dict[str, Callable[..., Any] | OnView]]()
    view.__dict__.update(vars(module))
    view.__dict__.pop("forward", None)
    for path, forward in forwards.items():
        name, _, rest = path.partition(".")
        if name:
            inside.setdefault(name, {})[rest] = forward
        else:
            view.__dict__["forward"] = MethodType(forward.function, view) if type(forward) is OnView else forward
    if inside:
        found = {name: view_of(module.get_submodule(name), those) for name, those in inside.items()}
        view.__dict__["_modules"] = {**module._modules, **found}
    return view


def _accepted(kind: type[nn.Module], **arguments: Any) -> dict[str, Any]:
    """Return those of the arguments that `kind.forward` takes."""
    names = _names_taken(kind.forward)
    return arguments if names is None else {name: value for name, value in arguments.items() if name in names}


@cache
def _names_taken(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a forward's arguments; None if it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
