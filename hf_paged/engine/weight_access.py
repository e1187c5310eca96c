"""Reading and writing of a running engine's weights and LoRA adapters, on all its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from hf_paged.engine.locked_core import LockedCore, updates
from hf_paged.engine.ranks import interrupts
from hf_paged.engine.ranks.commands import BeginWeightUpdate, GatherWeights
from hf_paged.engine.ranks.weight_transfer import ActiveAdapters, NewAdapter, NoAdapter, WeightLoader, buckets
from hf_paged.errors import PartlyLoadedError
from hf_paged.parallel.adapters import (
    active_names,
    add_adapter,
    follow_layers,
    read_adapter,
    removable_name,
    remove_adapter,
)
from hf_paged.parallel.group import SINGLE


class WeightAccess(LockedCore):
    """The weights of one engine's model."""

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Let this thread write the model's weights in the block while requests of any thread are unfinished.

            with engine.weight_update():
                optimizer.step()

        Waits for the end of the step under way; no further step runs before the end of the block. At the end the engine
        treats the weights as changed: `EngineStats.weights_version` goes up, the prefix cache is emptied, running
        requests start over or keep their keys and values (`PagedConfig.on_weight_change`), and merged weights, RoPE
        tables and CUDA graphs are checked before the next step. After an exception in the block the weights count as
        changed, too. On a GPU the block's work on the thread's current stream runs behind the last step, and the next
        step behind the block's work. Ranks that run one script must enter the block together.

        Raises:
            RuntimeError: inside of a step, or of another update, of this engine by the same thread; where the model
                is sharded by FSDP2, also inside of `hf_paged.gathered`, and while requests run.
            EngineClosedError: the model was disabled.
        """
        with self._uninterrupted(), self._lock.turn() as turn, self._lock.rlock:
            turn.leave()
            self._refuse_inside("weight_update() was entered")
            self._check_open()
            if self.replica is not None and self.replica.is_readable:
                if self.replica.is_pinned:
                    raise RuntimeError("weight_update() was entered inside of hf_paged.gathered(model), whose weights "
                                       "are gathered at its begin: leave the block first")
                if self._core.is_in_use:
                    raise RuntimeError("weight_update() of a sharded model was entered while requests run over "
                                       "gathered weights, which no update reaches: end them first")
            self._carry_out(BeginWeightUpdate())
            self._updating_thread = threading.get_ident()
            self._update = object()
            token = updates.set((*updates.get(), self._update))
            try:
                self._core.weights_in_doubt = not self.group.is_parallel
                self._core.follow_stream()
                with interrupts.let_through():
                    yield
            finally:
                try:
                    self._commands.tell(None)
                    self._core.follow_stream()
                    self._core.weights_written()
                finally:
                    self._updating_thread = self._update = None
                    with suppress(ValueError):  # the block was left in another context than it was entered in
                        updates.reset(token)
                    self._run_deferred()

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *,
                     partial: bool = False) -> None:
        """Write new values into the model's weights, in place, as one `weight_update`.

        Args:
            weights: whole tensors by their names in the unsharded model's `state_dict`, as a dict or as pairs; of any
                float dtype, on any device. An iterator is read one pair at a time, may be interrupted by Ctrl-C, and
                may not use the engine. Tied weights may have one name or both. Names of checkpoints that keep each
                expert's matrices apart, or leave out the causal LM's prefix, are accepted, too.
            partial: some of the model's tensors may be missing, and keep their values.

        Raises:
            ValueError, TypeError: a name, shape or dtype that is not the model's, a tensor that is missing, a layer
                that is quantized. Nothing was written: with a dict, list or tuple always; with an iterator if the error
                was found before the first tensor was written.
            PartlyLoadedError: any error after the first tensor was written, the iterator's own included; the error
                names the tensors that were written.
            RuntimeError: inside of a step of this engine; a model that its trainer shards.
        """
        self._check_holds_weights()
        sent = self._are_sent
        loader = WeightLoader(self.model, self.group if sent else SINGLE, self._commands.together, partial=partial)
        pairs: Any = loader.checked(weights) if sent else weights
        with nullcontext() if self.is_updating() else self.weight_update():
            if not sent:  # no rank writes before all ranks have checked
                pairs = self._agreed(lambda: loader.checked(weights), loader)
            self._agreed(lambda: loader(pairs), loader)

    @property
    def _are_sent(self) -> bool:
        """Whether rank 0 sends weights to the other ranks, if there are any; otherwise every rank's caller has them."""
        return self.group.driven or not self.group.is_parallel

    def _agreed(self, work: Callable[[], Any], loader: WeightLoader | None = None) -> Any:
        """Return what ``work`` returns; where every rank does the same, raise on every rank if it raised on one."""
        if self._are_sent:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        if self.group.any(error is not None) and error is None:
            what = "another rank could not take what its caller gave it"
            written = () if loader is None else tuple(loader.written)
            error = PartlyLoadedError(what, written) if written else ValueError(what)
        if error is not None:
            raise error
        return result

    def _check_alike(self, given: Any) -> None:
        """Raise ValueError on every rank where callers of the ranks gave them different things, which pickle."""
        if self._are_sent:
            return

        def compare() -> None:
            if (first := self.group.broadcast(given)) != given:
                raise ValueError(f"rank {self.group.rank} was given {given!r:.200}, rank 0 {first!r:.200}: expected "
                                 f"the same calls on all {self.group.size} ranks of a model")

        self._agreed(compare)

    def load_adapter(self, name: str, adapter: Any, config: Any = None) -> None:
        """Add a LoRA adapter to the model, as one `weight_update`. Requests may name the adapter; it is not activated.

        Every rank of a sharded model gets its part of the adapter. PEFT has to be installed. The LoraConfig's targets
        must be linear layers of the decoder and, as ``target_parameters``, weights of its experts; embeddings, head and
        variants (DoRA) are refused. No request can name an adapter of a model with LoRA on experts: see `set_adapter`.

        Args:
            name: the adapter's name, for `adapter_names` and `adapter_name`.
            adapter: a directory or hub id of an adapter that PEFT saved, or its state dict by PEFT's names.
            config: a LoraConfig or its dict; needed with a state dict.

        Raises:
            ImportError: PEFT is not installed.
            OSError: there is no such folder, or no adapter in it.
            ValueError, TypeError: the name is taken, or the adapter does not fit the model; the model is unchanged.
            RuntimeError: as from `weight_update`; a model that its trainer shards.
        """
        self._check_holds_weights()
        with self.weight_update():
            settings, tensors = self._agreed(lambda: read_adapter(name, adapter, config))
            self._check_alike(name)
            names, is_sent = list[str](), False
            try:
                self._agreed(lambda: names.extend(add_adapter(self.model, name, settings)))
                loader = WeightLoader(self.model, self.group if self._are_sent else SINGLE, self._commands.together,
                                      only=frozenset(names))
                pairs = self._agreed(lambda: loader.checked(tensors), loader)
                is_sent = True
                self._commands.tell(NewAdapter(name, settings))
                self._agreed(lambda: loader(pairs), loader)
            except BaseException:
                if names:  # else the model may have another adapter of this name
                    remove_adapter(self.model, name)
                if is_sent:
                    self._commands.tell(NoAdapter(name))
                raise

    def set_adapter(self, names: str | Sequence[str] | None) -> None:
        """Make LoRA adapters the active ones, for requests that name none, on all ranks, as one `weight_update`.

        Args:
            names: name of an adapter of the model, or several, whose updates are added in this order; None or []: no
                adapter is active.

        Raises:
            ValueError, TypeError: the model lacks an adapter, or one is merged or more than LoRA (``modules_to_save``).
            RuntimeError: as from `load_adapter`.
        """
        self._change_adapters(lambda: ActiveAdapters(active_names(self.model, names)))

    def delete_adapter(self, name: str) -> None:
        """Remove a LoRA adapter from the model, on all ranks, as one `weight_update`.

        Unfinished requests that name the adapter end with ``finish_reason="error"``.

        Raises:
            ValueError: the model has no adapter of this name, or it is merged, or more than LoRA.
            RuntimeError: as from `load_adapter`.
        """
        self._change_adapters(lambda: NoAdapter(removable_name(self.model, name)))

    def _change_adapters(self, checked: Callable[[], ActiveAdapters | NoAdapter]) -> None:
        """Carry a message about adapters out on all ranks, as one `weight_update`.

        Args:
            checked: returns the message, or raises if it does not fit the model.
        """
        self._check_holds_weights()
        if self._are_sent:  # before requests are touched; ranks that differ would wait for each other
            checked()
        with self.weight_update():
            message = self._agreed(checked)
            self._check_alike(message)
            tuners = list(self.tuners)
            with self._uninterrupted():  # no rank is left with other adapters
                message.apply(self.model)
                follow_layers(tuners, self.model)
                self._commands.tell(message)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and whole tensors, on the host, of the unsharded model's `state_dict`.

        Each tensor has memory of its own. Tensors are gathered in buckets of at most 256 MiB, or of one tensor. Tied
        weights are yielded once, by their first name. Requests may run between two tensors, and weights may change: a
        tensor has the values of the moment at which its bucket was gathered. Where every rank runs the script, each
        rank has to exhaust the iterator, which is empty on ranks > 0.

        Raises:
            RuntimeError: inside of a step, or a `weight_update`, of this engine; a model that its trainer shards.
        """
        self._check_holds_weights()
        for names in buckets(self.model):
            with self._uninterrupted(), self._lock.turn(), self._lock.rlock:
                self._refuse_inside("named_weights() was used")
                self._check_open()
                tensors = self._carry_out(GatherWeights(names))
            for name, tensor in zip(names, tensors, strict=True):
                if tensor is not None:
                    yield name, tensor

    def _check_holds_weights(self) -> None:
        if self.replica is not None:
            raise RuntimeError("the model's weights are sharded by its trainer: expected them to be read and written "
                               "there")

    @contextmanager
    def writing_weights(self) -> Iterator[None]:
        """Hold the engine between two steps, for code that writes weights that steps read."""
        with self._held():
            self._core.drain()
            with self._core.changing():
                yield
