"""Interface between the runner and a model family: KV shapes, layers on packed tokens, and reasons against a model."""

from __future__ import annotations

import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import PreTrainedModel

from hf_paged.attention.spec import AttentionSpec
from hf_paged.errors import Reason
from hf_paged.guards.adapter_hooks import names_in_force
from hf_paged.guards.hub_kernels import kernel_numbers
from hf_paged.guards.original_classes import of_class
from hf_paged.guards.plain_tensors import plain_tensors
from hf_paged.guards.snapshot import ModelSnapshot
from hf_paged.kernels.attention.types import AttentionOptions
from hf_paged.models.layer_ops import FUSED, PLAIN
from hf_paged.models.lora_rows import AdapterRows
from hf_paged.models.precision import autocast_of_call
from hf_paged.models.replica import replica_of
from hf_paged.models.tokenwise import quantization_state
from hf_paged.models.tuners import BASE, AdapterCounts, adapter_state, is_lora, row_reason, states_by_adapter
from hf_paged.parallel.group import ParallelGroup, group_of

_KNOWN_LAYERS = (torch.nn.Linear, torch.nn.Embedding)  # whose code eligibility requires to be torch's


class KVSpec(NamedTuple):
    """Shape of the cache that a model needs: per layer K and V of [num_blocks, block_size, num_kv_heads, head_dim].

    ``cache_dtype`` is the dtype of K and V, ``compute_dtype`` that of the embedding and the first hidden states. They
    differ only under autocast, where linear layers and attention compute in ``cache_dtype``. Heads are one rank's.
    """

    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    cache_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device

    def attention(self, block_size: int) -> AttentionSpec:
        """What backends of attention are told of the model."""
        return AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.cache_dtype, self.device,
                             block_size)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that one block takes over all layers."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize


class ModelReadings:
    """Values read off a model's modules, valid while `facts` hold. Keeps no tensor alive.

    ``state``: constants, active adapters and settings of quantized layers, as text. ``called_kinds``: classes of the
    layers that are called as they stand, without torch's. ``dtypes``: dtypes of floating-point parameters.
    ``adapters``: by name of a LoRA adapter, the state for rows under it in place of ``state``. ``found``: conditions
    besides the modules under which eligibility found nothing against the model, or None.
    """

    def __init__(self, facts: ModelSnapshot, state: str, called_kinds: tuple[type, ...], dtypes: frozenset[torch.dtype],
                 tensors: list[torch.Tensor], modules: list[tuple[str, nn.Module]], constants: str) -> None:
        self.facts, self.state, self.called_kinds, self.dtypes = facts, state, called_kinds, dtypes
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        lora = [(path, module) for path, module in modules if is_lora(module)]
        self._lora = [(path, weakref.ref(layer)) for path, layer in lora]
        self.adapters = {name: f"{constants}{of_it}" for name, of_it in states_by_adapter(lora).items()} if lora else {}
        self.adapter_names = tuple(name for name in self.adapters if name != BASE)
        self.found: Any = None

    def lora_layers(self) -> list[tuple[str, Any]]:
        """Return the model's LoRA layers with their paths."""
        return [(path, layer) for path, reference in self._lora if (layer := reference()) is not None]

    def tensors(self) -> list[torch.Tensor]:
        """Return the modules' plain tensors."""
        return [tensor for reference in self._tensors if (tensor := reference()) is not None]


class StepContext(Protocol):
    """Step of T packed tokens as a model's layers use it: positions, cache slots, and attention over the pages."""

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64, position of each token in its sequence."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[T] int64, cache slot of each token's key and value; -1: not stored."""

    @property
    def adapters(self) -> torch.Tensor | None:
        """[T] int32, the adapter of each token: 0 the model's active ones, -1 none, i > 0 the i-th of
        `ModelExecutor.adapter_names` alone. None: 0 for all tokens."""

    @property
    def decode_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Block-table lines [T] int32 of the rows, and the table [S, max_blocks] int32, in a step of few decode rows,
        each the only new token of its sequence. None for other steps."""

    @property
    def wanted(self) -> torch.Tensor | None:
        """[W] int64, the tokens whose final hidden states are read; None: all tokens."""

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V pool of a layer."""
        ...

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend by query [T, Hq, D] over the pages, which hold the step's own keys and values, too -> [T, Hq, D]."""
        ...

    def last_token_step(self) -> StepContext:
        """Return the tokens `wanted` as a step of their own, whose keys and values are in the pages."""
        ...


class ModelExecutor(ABC):
    """Executor that runs one family's modules on packed tokens. Does not keep the model alive."""

    def __init__(self, model: PreTrainedModel, model_class: type, *, merge_weights: bool = True,
                 fused_kernels: bool = True, one_launch: bool = True) -> None:
        self._source = weakref.ref(model)
        self.replica = replica_of(model)
        self.model_class: Any = model_class  # transformers' own, which the model's class is or derives from
        self._merge_weights = merge_weights
        self._ops = FUSED if fused_kernels else PLAIN
        self._wants_one_launch = one_launch and fused_kernels
        # Dtype to which the running calls cast (see `autocast_of_call`). It may change only while no call runs: copies
        # of weights, the pool's dtype and the prefix cache's key depend on it.
        self.autocast: torch.dtype | None = None
        self._look: ModelReadings | None = None
        self._row_names: tuple[str, ...] = ()
        self._lora: list[weakref.ref] = []
        self._compares_once: int | None = None  # the thread inside of `compared_once`
        self._is_compared = False

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

    def finds_shards(self) -> bool:
        """Return whether the model was sharded since the last check; then its replica runs from now on."""
        if self.replica is None:
            self.replica = replica_of(self.source)
            return self.replica is not None
        return False

    @property
    def config(self) -> Any:
        """The config that the decoder's modules read: of an image-text model the text config."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def group(self) -> ParallelGroup:
        """The ranks that hold the model together."""
        return group_of(self.model)

    def autocast_of_call(self) -> torch.dtype | None:
        """Return the dtype to which a call made now casts; None without autocast, or if all weights have it."""
        cast = autocast_of_call(self.source)
        return None if cast is None or self.look().dtypes == {cast} else cast

    @abstractmethod
    def kv_spec(self) -> KVSpec:
        """Return shapes, dtypes and device of this rank's cache, read off the modules."""

    @abstractmethod
    def windows(self) -> tuple[int | None, ...]:
        """Return, for every layer, how many last positions its attention reads; None: all."""

    @abstractmethod
    def max_length(self, asked: int | None = None) -> int:
        """Return the longest sequence in tokens: `asked`, as far as packed steps compute what stock computes.

        If `asked` is None, the number of the model's positions.
        """

    @abstractmethod
    def prepare(self, max_model_len: int) -> None:
        """Make or renew what layers need besides modules (merged weights, RoPE), before an idle engine gets busy."""

    @abstractmethod
    def refresh(self, checksum: torch.Tensor | None) -> None:
        """Enqueue the renewal of copies of weights, if there are any (see `Shadow.refresh`), after `prepare`."""

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
        """Return tensors besides the modules' and `own_tensors` that a graph captured since the last call reads.

        The tensors have to live as long as the graph.
        """
        return []

    @abstractmethod
    def is_current(self) -> bool:
        """Return False if `prepare` would change what the layers compute."""

    @abstractmethod
    def drop_references(self) -> None:
        """Release the memory of parameters until `prepare`; tables that graphs read stay at their addresses."""

    @abstractmethod
    def release(self) -> None:
        """Release everything that `prepare` made; every parameter has memory of its own afterwards."""

    @abstractmethod
    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Compute final normed hidden states [T, hidden_size], or [W, hidden_size] of `wanted` tokens, from ids [T]."""

    @abstractmethod
    def logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits [R, vocab_size] of [R, hidden_size], on every rank; ``adapters`` [R]: as in `StepContext`."""

    @abstractmethod
    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Compute this rank's columns [R, rows] of the logits (`VocabParallelHead`); with one rank all columns."""

    @abstractmethod
    def own_modules(self) -> Iterator[tuple[str, torch.nn.Module, type]]:
        """Yield (name, module, expected class) of every module whose forward the executor's own code replaces."""

    @abstractmethod
    def called_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield (name, module) of every module that the executor calls as it stands, on packed tokens."""

    @abstractmethod
    def patched(self) -> str | None:
        """Return the first replaced function of transformers or torch that stock would run here, or None."""

    @abstractmethod
    def asked_of_model(self) -> frozenset[str]:
        """Return names that stock's code looks up in the model's class: a derived class may not redefine them."""

    @abstractmethod
    def activations(self) -> tuple[type, ...]:
        """Return the classes of the activation modules in the model."""

    @abstractmethod
    def replacement_reason(self, name: str, module: torch.nn.Module) -> Reason | None:
        """Return why a forward that replaces the class's on an instance is not run natively, or None."""

    @abstractmethod
    def function_kernels(self) -> list[tuple[str, int]]:
        """Return (name, number) of every function of transformers that a kernel of the Hub replaces now."""

    @abstractmethod
    def registry_reason(self) -> Reason | None:
        """Return why an entry of transformers' registries that the modules use is not transformers' own, or None."""

    @abstractmethod
    def constants(self) -> tuple:
        """Return numbers and names that the code reads besides tensors: part of the keys of prefix cache and graphs."""

    @abstractmethod
    def constants_reason(self) -> Reason | None:
        """Return why the executor's code cannot run with the present constants, or None."""

    def may_have_float_weight(self, module: torch.nn.Module) -> bool:
        """Return whether an own module returns its input's dtype whatever the dtype of its weight."""
        return False

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens: rows of the embedding, over all ranks and without padding."""

    @property
    @abstractmethod
    def num_logits(self) -> int:
        """Number of logits of a token: columns of the head, over all ranks and without padding."""

    def last_look(self) -> ModelReadings | None:
        """Return what was last read off the modules, or None if anything changed since."""
        once = self._compares_once == threading.get_ident()
        if not (once and self._is_compared) and self._look is not None and not self._look.facts.hold(self.model):
            self._look = None
        if once:  # another thread's write might undo `compare_again`
            self._is_compared = True
        return self._look

    @contextmanager
    def compared_once(self) -> Iterator[None]:
        """Let this thread compare the modules with the last look only once in a block that runs no code of the user."""
        self._compares_once, self._is_compared = threading.get_ident(), False
        try:
            yield
        finally:
            self._compares_once = None

    def compare_again(self) -> None:
        """Make `last_look` compare again inside of `compared_once`, after code of the user ran."""
        self._is_compared = False

    def look(self, facts: ModelSnapshot | None = None) -> ModelReadings:
        """Return `last_look`, or read the modules anew. `facts`: a snapshot taken before, for what is read now."""
        look = self.last_look() if facts is None else None
        if look is None:
            facts = ModelSnapshot(self.model) if facts is None else facts  # first, so that later changes are noticed
            modules = list(self.model.named_modules())
            kernels, quantization = kernel_numbers(modules), quantization_state(modules)
            constants = repr((self.constants(), kernels, quantization))
            state = f"{constants}{adapter_state(self.model)}"
            kinds = {type(inner): None for _, module in self.called_modules() for inner in module.modules()}
            dtypes = frozenset(p.dtype for p in self.model.parameters() if p.is_floating_point())
            look = ModelReadings(facts, state, tuple(kind for kind in kinds if kind not in _KNOWN_LAYERS), dtypes,
                        [tensor for _, tensor in plain_tensors(modules)], modules, constants)
            self._look = look
        return look

    def plain_tensors(self) -> list[torch.Tensor]:
        """Return tensors of the modules that are neither parameters nor buffers, in a fixed order."""
        return self.look().tensors()

    def state_key(self, adapter: str | None = None, *, compares_tensors: bool = True) -> bytes:
        """Return a digest of what a forward depends on besides tensors: constants, adapters, code of called modules.

        Args:
            adapter: adapter that rows name; None: the active ones. No two names, and no name and the active adapters,
                have a key in common. A name that the model lacks has a key of its own as well.
            compares_tensors: False leaves out of the comparison with the last look what the digest does not depend on.
        """
        look = self._look
        if compares_tensors or look is None or not look.facts.hold_but_for_tensors(self.model):
            look = self.look()
        versions = [(kind.__qualname__, of_class(kind).version()) for kind in look.called_kinds]
        state = look.state if adapter is None else look.adapters.get(adapter)
        digest = xxhash.xxh3_128_digest(f"{state}{versions}{self.function_kernels()}{self.autocast}".encode())
        if adapter is None:
            return digest
        return digest + hashlib.sha256(b"adapter:" + adapter.encode("utf-8", "surrogatepass")).digest()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that rows can use, sorted: entries 1, 2, ... of `StepContext.adapters`."""
        return self.look().adapter_names

    def name_rows(self) -> tuple[str, ...]:
        """Let `StepContext.adapters` count the present `adapter_names` from now on, and return these names."""
        look = self.look()
        self._row_names, self._lora = look.adapter_names, [weakref.ref(layer) for _, layer in look.lora_layers()]
        return self._row_names

    def adapter_rows(self, adapters: torch.Tensor | None) -> AdapterRows | None:
        """Return `StepContext.adapters` with their names, as layers take it."""
        return None if adapters is None else AdapterRows(adapters, self._row_names)

    def adapter_reason(self, name: str) -> Reason | None:
        """Return why no row can run under this adapter (or `BASE`) beside rows of other adapters now, or None."""
        look = self.look()
        if name == BASE and not look.adapters:  # the model is its own base
            return None
        if name != BASE and name not in look.adapters:
            found = ", ".join(map(repr, (*look.adapter_names, BASE)))
            return Reason("the model has no adapter {}: expected one of {}", repr(name), found,
                          remedy="Load it with `load_adapter` of the PagedGenerator, the Engine or the PeftModel.")
        return row_reason(look.lora_layers(), name)

    def adapters_in_force(self) -> list[str] | Reason | None:
        """Return the adapters that PEFT's hooks give the rows of a forward now, by row; None without hooks.

        The LoRA layers come from the last look, with which `unsupported_reason` has just compared the modules.
        """
        look = self._look or self.look()
        if not look.adapters:
            return None
        if self.replica is not None:  # PEFT puts its hooks on the user's model
            return names_in_force([layer for layer in self.source.modules() if is_lora(layer)])
        return names_in_force([layer for _, layer in look.lora_layers()])

    def adapter_counts(self) -> AdapterCounts:
        """Return an object that quickly detects added and removed adapters."""
        return AdapterCounts(layer for _, layer in self.look().lora_layers())

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Return an upper estimate of a step's bytes: hidden states, the MLP's inputs, fp32 logits and their copies."""
        config, itemsize = self.config, self.kv_spec().compute_dtype.itemsize
        per_token = (8 * config.hidden_size + 3 * config.intermediate_size // self.group.size) * itemsize
        return num_tokens * per_token + num_rows * config.vocab_size * 4 * 4
