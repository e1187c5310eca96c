"""What the runner needs of a model family: its KV shapes, its layers on packed tokens, and what it recognises."""

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
from hf_paged.guards.facts import Facts
from hf_paged.guards.hub_kernels import kernel_numbers
from hf_paged.guards.originals import of_class
from hf_paged.guards.plain_tensors import plain_tensors
from hf_paged.kernels.attention.types import AttentionOptions
from hf_paged.models.layer_ops import FUSED, PLAIN
from hf_paged.models.lora_rows import AdapterRows
from hf_paged.models.precision import autocast_of_call
from hf_paged.models.replica import replica_of
from hf_paged.models.tokenwise import quantization_state
from hf_paged.models.tuners import BASE, AdapterCounts, adapter_state, is_lora, row_reason, states_by_adapter
from hf_paged.parallel.group import ParallelGroup, group_of

_KNOWN_LAYERS = (torch.nn.Linear, torch.nn.Embedding)  # of which `recognise` allows no other code


class KVSpec(NamedTuple):
    """Shape of the cache a model needs: per layer K and V of [num_blocks, block_size, num_kv_heads, head_dim].

    ``cache_dtype`` is theirs, ``compute_dtype`` that of the embedding, with which the hidden states begin. They are one
    but for calls under autocast, whose linear layers and attention compute in ``cache_dtype``. Heads are a rank's.
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
        """Bytes that one block takes over all layers."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize


class Look:
    """What was read off a model's modules, and is so while `facts` hold. Keeps no tensor alive.

    ``state``: constants, active adapters, how quantized layers are set up. ``called_kinds``: classes of the layers that
    are called as they stand, but for torch's. ``dtypes``: of parameters of floats. ``adapters``: by name, what the
    result of a row under this LoRA adapter depends on in place of the active ones. ``found``: under what ambient state
    nothing spoke against the model, and what else that depends on.
    """

    def __init__(self, facts: Facts, state: str, called_kinds: tuple[type, ...], dtypes: frozenset[torch.dtype],
                 tensors: list[torch.Tensor], modules: list[tuple[str, nn.Module]], constants: str) -> None:
        self.facts, self.state, self.called_kinds, self.dtypes = facts, state, called_kinds, dtypes
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        lora = [(path, module) for path, module in modules if is_lora(module)]
        self._lora = [(path, weakref.ref(layer)) for path, layer in lora]
        self.adapters = {name: f"{constants}{of_it}" for name, of_it in states_by_adapter(lora).items()} if lora else {}
        self.adapter_names = tuple(name for name in self.adapters if name != BASE)
        self.found: Any = None

    def lora_layers(self) -> list[tuple[str, Any]]:
        """The model's LoRA layers with their paths."""
        return [(path, layer) for path, reference in self._lora if (layer := reference()) is not None]

    def tensors(self) -> list[torch.Tensor]:
        """The modules' plain tensors."""
        return [tensor for reference in self._tensors if (tensor := reference()) is not None]


class StepContext(Protocol):
    """One step as a model's layers see it: where its T packed tokens stand, and attention over the pages."""

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64, of each token in its sequence."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[T] int64, where its key and value go; -1: nowhere."""

    @property
    def adapters(self) -> torch.Tensor | None:
        """[T] int32, the adapter of each token: 0 the model's active ones, -1 none, i > 0 the i-th of
        `ModelExecutor.adapter_names` alone. None: 0 for all."""

    @property
    def decode_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of a step of few rows that decode, each the only new token of its sequence: their lines of the block table
        [T] int32, and that table [S, max_blocks] int32. None: of other steps."""

    @property
    def wanted(self) -> torch.Tensor | None:
        """[W] int64, the tokens whose final hidden states are read; None: those of all."""

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pool of a layer."""
        ...

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """query [T, Hq, D] over the pages, the step's own keys and values being in them -> [T, Hq, D]."""
        ...

    def of_wanted(self) -> StepContext:
        """The tokens `wanted` as a step of their own, whose keys and values are in the pages."""
        ...


class ModelExecutor(ABC):
    """Runs one family's own modules on packed tokens. Does not keep the model alive."""

    def __init__(self, model: PreTrainedModel, model_class: type, *, merge_weights: bool = True,
                 fused_kernels: bool = True, one_launch: bool = True) -> None:
        self._source = weakref.ref(model)
        self.replica = replica_of(model)
        self.model_class: Any = model_class  # transformers' own, which the model's class is or derives from
        self._merge_weights = merge_weights
        self._ops = FUSED if fused_kernels else PLAIN
        self._wants_one_launch = one_launch and fused_kernels
        # To which dtype the calls that run now cast (see `autocast_of_call`). It changes while none runs: what the
        # executor keeps, the pool's dtype and the prefix cache's key follow.
        self.autocast: torch.dtype | None = None
        self._look: Look | None = None
        self._row_names: tuple[str, ...] = ()
        self._lora: list[weakref.ref] = []
        self._compares_once: int | None = None  # the thread inside of `compared_once`
        self._is_compared = False

    @property
    def source(self) -> Any:
        """The user's model; RuntimeError once it is gone."""
        model = self._source()
        if model is None:
            raise RuntimeError("the model of this engine was garbage-collected")
        return model

    @property
    def has_source(self) -> bool:
        """Is the user's model still there?"""
        return self._source() is not None

    @property
    def model(self) -> Any:
        """Whose modules run: the user's model, or the replica of one that is sharded; RuntimeError once it is gone."""
        return self.source if self.replica is None else self.replica.model

    def finds_shards(self) -> bool:
        """Was the model sharded since it was looked at for the last time? Then its replica runs from now on."""
        if self.replica is None:
            self.replica = replica_of(self.source)
            return self.replica is not None
        return False

    @property
    def config(self) -> Any:
        """The config that the decoder's modules read: of an image-text model that of its text."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def group(self) -> ParallelGroup:
        """The ranks that hold the model together."""
        return group_of(self.model)

    def autocast_of_call(self) -> torch.dtype | None:
        """To which dtype a call made here and now casts; None: it does not, or nothing of the model is another's."""
        cast = autocast_of_call(self.source)
        return None if cast is None or self.look().dtypes == {cast} else cast

    @abstractmethod
    def kv_spec(self) -> KVSpec:
        """Shapes, dtypes and device of this rank's cache, read off the modules."""

    @abstractmethod
    def windows(self) -> tuple[int | None, ...]:
        """Of every layer, how many positions its attention sees, the last ones; None: all."""

    @abstractmethod
    def max_length(self, asked: int | None = None) -> int:
        """Longest sequence in tokens: as `asked`, as far as packed steps give what stock gives.

        None: what the model's positions allow.
        """

    @abstractmethod
    def prepare(self, max_model_len: int) -> None:
        """Between idle and busy: make or renew what the layers need besides the modules (merged weights, RoPE)."""

    @abstractmethod
    def refresh(self, checksum: torch.Tensor | None) -> None:
        """Enqueue the renewal of copies of weights, if there are any (see `Shadow.refresh`); `prepare` came before."""

    def copies_are_stale(self) -> bool:
        """Do addresses and version counters say that weights are others than their copies were made of?"""
        return False

    @property
    def has_copies(self) -> bool:
        """Are there copies of weights, which `refresh` has to renew?"""
        return False

    @property
    def copied_bytes(self) -> int:
        """Memory of copies of weights that are held now."""
        return 0

    def bytes_to_come(self) -> int:
        """Memory of copies of weights that `prepare` would add now."""
        return 0

    def own_tensors(self) -> list[torch.Tensor]:
        """Tensors besides the modules' that steps read and that may be replaced by others."""
        return []

    def may_run_at_once(self, rows: int, lengths: np.ndarray) -> bool:
        """May one launch compute the layers of a step of so many decode rows, with padding, none of which reads what
        another one writes? ``lengths``: tokens of the real rows that the cache holds."""
        return False

    def runs_at_once(self, rows: int) -> bool:
        """Would one launch compute a step of so many rows now? Its kernel may be on its way."""
        return False

    def captured_tensors(self) -> list[torch.Tensor]:
        """Tensors besides the modules' and `own_tensors` that what was captured since the last call reads.

        They have to live as long as its graph.
        """
        return []

    @abstractmethod
    def is_current(self) -> bool:
        """False where `prepare` would change what the layers compute."""

    @abstractmethod
    def let_go(self) -> None:
        """Hold no memory of parameters until `prepare`; tables of its own stay where graphs read them."""

    @abstractmethod
    def release(self) -> None:
        """Give up all of that; every parameter has memory of its own afterwards."""

    @abstractmethod
    def hidden_states(self, input_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Token ids [T] int64 -> final normed hidden states [T, hidden_size], or [W, hidden_size] of `wanted` ones."""

    @abstractmethod
    def logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size], on every rank. ``adapters`` [R]: as `StepContext.adapters`."""

    @abstractmethod
    def shard_logits(self, hidden_states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden_size] -> [R, rows], this rank's own columns (`VocabParallelHead`); with one rank all of them."""

    @abstractmethod
    def own_modules(self) -> Iterator[tuple[str, torch.nn.Module, type]]:
        """(name, module, expected class) of every module whose forward the executor replaces by its own code."""

    @abstractmethod
    def called_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """(name, module) of every module that the executor calls as it stands, on packed tokens."""

    @abstractmethod
    def patched(self) -> str | None:
        """The first of transformers' or torch's functions that stock would run here and that somebody replaced."""

    @abstractmethod
    def asked_of_model(self) -> frozenset[str]:
        """Names for which stock's code asks the model's class: a class that derives from it may not have its own."""

    @abstractmethod
    def activations(self) -> tuple[type, ...]:
        """Classes of the activation modules in the model."""

    @abstractmethod
    def replacement_reason(self, name: str, module: torch.nn.Module) -> Reason | None:
        """Why what stands on an instance for its class's forward is not run natively, or None."""

    @abstractmethod
    def function_kernels(self) -> list[tuple[str, int]]:
        """(name, number) of every function of transformers that a kernel of the Hub replaces right now."""

    @abstractmethod
    def registry_reason(self) -> Reason | None:
        """Why an entry of transformers' registries that the model's modules ask for is not its own, or None."""

    @abstractmethod
    def constants(self) -> tuple:
        """Numbers and names outside the tensors that its code reads: part of the prefix-cache key and of a graph's."""

    @abstractmethod
    def constants_reason(self) -> Reason | None:
        """Why these constants, as they are now, are none that the executor's code can run with, or None."""

    def may_have_float_weight(self, module: torch.nn.Module) -> bool:
        """True for an own module that hands on its input's dtype whatever the dtype of its weight."""
        return False

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens: rows of the embedding, over all ranks and without padding."""

    @property
    @abstractmethod
    def num_logits(self) -> int:
        """Number of logits of a token: columns of the head, over all ranks and without padding."""

    def last_look(self) -> Look | None:
        """What was last read off the modules, or None where anything is not as it was."""
        once = self._compares_once == threading.get_ident()
        if not (once and self._is_compared) and self._look is not None and not self._look.facts.hold(self.model):
            self._look = None
        if once:  # what another thread wrote might come after `compare_again`
            self._is_compared = True
        return self._look

    @contextmanager
    def compared_once(self) -> Iterator[None]:
        """In here this thread compares the modules with the last look once: none of the user's code runs between."""
        self._compares_once, self._is_compared = threading.get_ident(), False
        try:
            yield
        finally:
            self._compares_once = None

    def compare_again(self) -> None:
        """Inside of `compared_once`: the user's code ran."""
        self._is_compared = False

    def look(self, facts: Facts | None = None) -> Look:
        """The same, read anew where it has to be. `facts`: of before, to which what is read now belongs."""
        look = self.last_look() if facts is None else None
        if look is None:
            facts = Facts(self.model) if facts is None else facts  # first: what changes meanwhile is seen next time
            modules = list(self.model.named_modules())
            kernels, quantization = kernel_numbers(modules), quantization_state(modules)
            constants = repr((self.constants(), kernels, quantization))
            state = f"{constants}{adapter_state(self.model)}"
            kinds = {type(inner): None for _, module in self.called_modules() for inner in module.modules()}
            dtypes = frozenset(p.dtype for p in self.model.parameters() if p.is_floating_point())
            look = Look(facts, state, tuple(kind for kind in kinds if kind not in _KNOWN_LAYERS), dtypes,
                        [tensor for _, tensor in plain_tensors(modules)], modules, constants)
            self._look = look
        return look

    def plain_tensors(self) -> list[torch.Tensor]:
        """Tensors of the modules that are neither parameters nor buffers, in a fixed order."""
        return self.look().tensors()

    def state_key(self, adapter: str | None = None, *, compares_tensors: bool = True) -> bytes:
        """Digest of what a forward depends on besides tensors: constants, active adapters, code of what is called.

        Args:
            adapter: of rows that name this one; no two names, and no name and the active adapters, have a key in
                common. One that the model lacks has a key of its own as well.
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
        """The LoRA adapters that rows can name, sorted: entries 1, 2, ... of `StepContext.adapters`."""
        return self.look().adapter_names

    def name_rows(self) -> tuple[str, ...]:
        """From now on `StepContext.adapters` counts the names that `adapter_names` holds now, which it returns."""
        look = self.look()
        self._row_names, self._lora = look.adapter_names, [weakref.ref(layer) for _, layer in look.lora_layers()]
        return self._row_names

    def adapter_rows(self, adapters: torch.Tensor | None) -> AdapterRows | None:
        """`StepContext.adapters` for the layers."""
        return None if adapters is None else AdapterRows(adapters, self._row_names)

    def adapter_reason(self, name: str) -> Reason | None:
        """Why no row can run under this adapter (or `BASE`) beside rows of others, as the model is now, or None."""
        look = self.look()
        if name == BASE and not look.adapters:  # the model is its own base
            return None
        if name != BASE and name not in look.adapters:
            found = ", ".join(map(repr, (*look.adapter_names, BASE)))
            return Reason("the model has no adapter {}: expected one of {}", repr(name), found,
                          remedy="Load it with `load_adapter` of the PagedGenerator, the Engine or the PeftModel.")
        return row_reason(look.lora_layers(), name)

    def adapters_in_force(self) -> list[str] | Reason | None:
        """The adapters that PEFT's hooks give the rows of a forward right now, by row; None: there are no hooks.

        The LoRA layers are those of the last look: `unsupported_reason` has just compared the modules with it.
        """
        look = self._look or self.look()
        if not look.adapters:
            return None
        if self.replica is not None:  # PEFT finds the model's own layers
            return names_in_force([layer for layer in self.source.modules() if is_lora(layer)])
        return names_in_force([layer for _, layer in look.lora_layers()])

    def adapter_counts(self) -> AdapterCounts:
        """To be asked whether adapters came or went, quickly."""
        return AdapterCounts(layer for _, layer in self.look().lora_layers())

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Upper estimate of what one step allocates: hidden states, the MLP's inputs, fp32 logits and their copies."""
        config, itemsize = self.config, self.kv_spec().compute_dtype.itemsize
        per_token = (8 * config.hidden_size + 3 * config.intermediate_size // self.group.size) * itemsize
        return num_tokens * per_token + num_rows * config.vocab_size * 4 * 4
