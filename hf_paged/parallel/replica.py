"""Replica of a model that FSDP2 or DeepSpeed spread over ranks: its modules on each rank, over gathered weights.

The replica is what the model was before `fully_shard`: modules of the same classes with the same attributes, configs,
buffers and hooks. Its parameters are in the dtype that a forward of the model reads them in. The model itself is only
read. Of weights that DeepSpeed gathers, the replica has a copy at fixed addresses.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from hf_paged.errors import FallbackError, Reason
from hf_paged.guards.hooks import names_in
from hf_paged.guards.model_watch import ModelWatch
from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.parallel.fsdp import Shard, Sharding, is_hook, is_sharded, plain_class, sharding_of
from hf_paged.parallel.rendezvous import Gatherer, GatherShard, Rendezvous
from hf_paged.process_lock import ProcessLock

# Flags that a rank brings to a meeting: its weights changed; its call runs in stock; it raises if another's does.
CHANGED, STOCK, STRICT = "changed", "stock", "strict"
_OF_FSDP = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "__composable_api")
# A wrapper that only recomputes activations in a backward.
_CHECKPOINTING = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper"
_meetings: weakref.WeakKeyDictionary[nn.Module, Rendezvous] = weakref.WeakKeyDictionary()
_names: Counter[str] = Counter()


class Replica:
    """Whole copy of a sharded model on this rank. It keeps memory for weights from the first gathering to `release`.

    Args:
        source: the model; not kept alive.
    """

    def __init__(self, source: Any) -> None:
        self._source: Callable[[], Any] = weakref.ref(source)
        self._watch = ModelWatch()
        self._structure: int | None = None  # of the source, that the modules were made for
        self._reason: Reason | None = None
        self._sharding: Sharding | None = None
        self._model: Any = None
        self._wholes: dict[int, tuple[nn.Parameter, Shard]] = {}  # by id of the trainer's parameter
        self._checksum = ChecksumPlan()
        self._gathered: int | None = None  # checksum of this rank's parts when they were gathered last
        self._pins: Counter[int | None] = Counter()  # by thread; None: of all threads
        self._meeting = ProcessLock()  # one thread of this rank meets at a time
        self.refresh()

    @property
    def model(self) -> Any:
        """The replica, whose weights are right after `come`; the model itself if it cannot be gathered."""
        return self._source() if self._model is None else self._model

    @property
    def is_readable(self) -> bool:
        """Whether the model could be gathered when it was last checked."""
        return self._sharding is not None

    @property
    def meets_others(self) -> bool:
        """Whether other ranks keep parts of the model."""
        return self._sharding is not None and len(self._sharding.ranks) > 1

    @property
    def is_pinned(self) -> bool:
        """Whether this thread or all threads are inside of `pinned`."""
        return self._pins[None] > 0 or self.is_pinned_here

    @property
    def is_pinned_here(self) -> bool:
        """Whether this thread itself is inside of `pinned`, as in a native call."""
        return self._pins[threading.get_ident()] > 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a forward of the sharded model would, without other ranks; to be called inside of `pinned`."""
        outputs = self.model(*args, **kwargs)
        state: Any = getattr(self._source(), "_get_fsdp_state", lambda: None)()
        dtype = None if state is None else state._mp_policy.output_dtype
        if dtype is not None and isinstance(outputs.get("logits"), torch.Tensor):
            outputs["logits"] = outputs["logits"].to(dtype)
        return outputs

    @contextmanager
    def pinned(self, *, in_all_threads: bool = False) -> Iterator[None]:
        """Generate with the weights gathered last, in a ``with`` block whose calls do not meet other ranks."""
        who = None if in_all_threads else threading.get_ident()
        self._pins[who] += 1
        try:
            yield
        finally:
            self._pins[who] -= 1

    @property
    def nbytes(self) -> int:
        """Bytes that the replica's weights take."""
        return sum(whole.untyped_storage().nbytes() for whole, _ in self._wholes.values() if _has_memory(whole))

    @property
    def bytes_to_come(self) -> int:
        """Bytes that the next meeting would add."""
        return sum(whole.nbytes for whole, _ in self._wholes.values() if not _has_memory(whole))

    def refresh(self) -> Reason | None:
        """Make the modules anew if the model's changed; returns why the model cannot be gathered, or None."""
        source = self._source()
        structure = self._watch.structure(source)  # first, so that later changes are noticed
        if structure == self._structure:
            return self._reason
        sharding = sharding_of(source)
        if isinstance(sharding, Reason):
            self._structure, self._sharding, self._reason = None, None, sharding
            return sharding
        known, self._wholes = self._wholes, {}
        for shard in sharding.shards.values():
            key = id(shard.parameter)
            whole = known[key][0] if key in known and known[key][1].parameter is shard.parameter else None
            wanted = shard.parameter.shape, shard.dtype, sharding.device.type
            if whole is None or (whole.shape, whole.dtype, whole.device.type) != wanted:
                whole, self._gathered = _empty(shard.parameter.shape, shard.dtype, sharding.device), None
            self._wholes[key] = whole, shard
        self._model = _mirrored(source, sharding, {key: whole for key, (whole, _) in self._wholes.items()}, {})
        vars(self._model).pop("forward", None)  # a wrapper, which is checked on the model itself
        self._structure, self._sharding, self._reason = structure, sharding, None
        return None

    def is_stale(self) -> bool:
        """Return whether this rank's parts changed since they were gathered; waits for the device."""
        return self._gathered is None or self._checksum_now() != self._gathered

    def come(self, timeout: float, holding: Callable[[], AbstractContextManager], *, strict: bool) -> bool:
        """Meet the other ranks to generate natively; gather if the weights changed on one of them.

        Args:
            timeout: seconds.
            holding: makes a context that is entered while the weights are written.
            strict: raise if another rank's call runs in stock.

        Returns:
            False if another rank's call runs in stock; then nothing was gathered.

        Raises:
            RankAloneError: another rank does not come in time, or raises an error instead of coming.
            FallbackError: a call has to run in stock on another rank, and a rank is strict.
        """
        with self._meeting.rlock:
            try:
                now = self._checksum_now()
                gatherer = Gatherer(self._parts())
            except BaseException as error:  # usually out of memory
                self.refuse(error)
                raise
            brought = {flag for flag, holds in ((CHANGED, now != self._gathered), (STRICT, strict)) if holds}
            found = self._meet(brought, timeout)
            if STOCK in found:
                return False
            if CHANGED in found:
                with holding():
                    self._gathered = None
                    gatherer()
                    self._gathered = now
            return True

    def come_in_stock(self, timeout: float) -> None:
        """Meet the other ranks so that all of them run in stock; raises as `come`."""
        with self._meeting.rlock:
            self._meet({STOCK}, timeout)

    def refuse(self, error: BaseException) -> None:
        """Send the other ranks this rank's error instead of meeting them."""
        with self._meeting.rlock:
            if self.meets_others:
                self._rendezvous().refuse(error)

    def _meet(self, brought: set[str], timeout: float) -> frozenset[str]:
        if not self.meets_others:
            return frozenset(brought)
        found = self._rendezvous().meet(brought, timeout, "PagedConfig.gather_timeout")
        if {STOCK, STRICT} <= found:
            raise FallbackError("strict=True on a rank of this sharded model, and this call would go to stock generate "
                                "on a rank, and so on all of them")
        return found

    def _checksum_now(self) -> int:
        return int(self._checksum([shard.local() for _, shard in self._wholes.values()]))

    def release(self) -> None:
        """Release the weights' memory; the next meeting gathers them anew."""
        self._gathered = None
        for whole, _ in self._wholes.values():
            whole.data = _empty(whole.shape, whole.dtype, whole.device)

    def _parts(self) -> Iterator[GatherShard]:
        for whole, shard in self._wholes.values():
            if not _has_memory(whole):
                with torch.inference_mode(False):
                    whole.data = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
            yield GatherShard(shard.local(), whole.data, *shard.cut())

    def _rendezvous(self) -> Rendezvous:
        """Return the model's rendezvous, which all of its engines share."""
        source, sharding = self._source(), self._sharding
        assert sharding is not None
        if source not in _meetings:
            shapes = [(name, tuple(parameter.shape)) for name, parameter in self._model.named_parameters()]
            kind = xxhash.xxh3_64_hexdigest(repr((type(self._model).__qualname__, shapes, sharding.ranks)).encode())
            _names[kind] += 1
            _meetings[source] = Rendezvous(_get_default_store(), f"{kind}/{_names[kind]}", dist.get_rank(),
                                           sharding.ranks, (CHANGED, STOCK, STRICT))
        return _meetings[source]


def replica_of(model: nn.Module) -> Replica | None:
    """Return the replica that runs in place of a sharded model; None for a model that is not sharded."""
    return Replica(model) if is_sharded(model) else None


def num_meetings(model: nn.Module) -> int:
    """Return the number of meetings for calls of a model that ended for this rank, in whatever way."""
    rendezvous = _meetings.get(model)
    return 0 if rendezvous is None else rendezvous.num_meetings


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Make a parameter that has the memory of one element."""
    with torch.inference_mode(False):
        return nn.Parameter(torch.zeros(1, dtype=dtype, device=device).expand(shape), requires_grad=False)


def _has_memory(whole: torch.Tensor) -> bool:
    return whole.untyped_storage().nbytes() >= whole.numel() * whole.element_size()


def _mirrored(module: nn.Module, sharding: Sharding, wholes: dict[int, nn.Parameter],
              done: dict[int, nn.Module]) -> nn.Module:
    """Make a module, and those inside it, as they were before `fully_shard`, with whole parameters."""
    if id(module) in done:
        return done[id(module)]
    kind = plain_class(type(module))
    if f"{kind.__module__}.{kind.__name__}" == _CHECKPOINTING:
        inner: Any = module._checkpoint_wrapped_module
        return _mirrored(inner, sharding, wholes, done)
    mirror: Any = object.__new__(kind)
    done[id(module)] = mirror
    namespace = {name: _rebound(value, module, mirror) for name, value in vars(module).items()
                 if not name.startswith(_OF_FSDP)}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        namespace[name] = type(namespace[name])((key, hook) for key, hook in namespace[name].items()
                                                if not is_hook(hook) and names_in(hook) is None)
    namespace["_buffers"] = dict(module._buffers)
    namespace["_parameters"] = {
        name: parameter if (shard := sharding.shards.get((id(module), name))) is None
        else wholes[id(shard.parameter)] for name, parameter in module._parameters.items()
    }
    namespace["_modules"] = {name: child if child is None else _mirrored(child, sharding, wholes, done)
                             for name, child in module._modules.items()}
    vars(mirror).update(namespace)
    return mirror


def _rebound(value: Any, module: nn.Module, mirror: nn.Module) -> Any:
    """Bind a method of `module` that is an attribute of the instance to the mirror; returns other values unchanged."""
    return MethodType(value.__func__, mirror) if isinstance(value, MethodType) and value.__self__ is module else value
