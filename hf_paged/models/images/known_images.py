"""Images that an engine's model has encoded: equal ones run through its tower once, also in later calls."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models.executor import ModelExecutor, view_of
from hf_paged.models.images.encoded import Encoded, Form, split
from hf_paged.models.images.items import Items, are_equal, divided
from hf_paged.models.images.tower_attention import TowerAttention
from hf_paged.process_lock import ProcessLock

ENCODERS = ("get_image_features", "get_video_features")  # methods of a body: tower and projector
MOST_BYTES = 256 << 20  # of the images that are kept, with what was made of them


class _Kind(NamedTuple):
    """Calls of an encoder for which one proof holds."""

    method: str
    arguments: Hashable
    is_training: bool  # whether any module of the body is in train mode


class _Made(NamedTuple):
    """What an encoder made of images, and how its output holds that."""

    form: Form
    encoded: dict[int, Encoded]  # by the image's place


class _Version(NamedTuple):
    """What a model was before it encoded images."""

    numbers: Hashable
    checksum: torch.Tensor


class _Kept(NamedTuple):
    parts: tuple[torch.Tensor, ...]  # of the arguments
    form: Form
    encoded: Encoded
    checksum: torch.Tensor  # `_Version.checksum`

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self.parts, self.encoded.rows, *self.encoded.layers))


class KnownImages:
    """Encoders that run over images that are not equal, bit for bit, to others of the call or to those that are kept.

    What the class's own method makes of these is handed out for all. Where that comes up for the first time, with
    arguments of a kind, the method has to make the same of an image in another place among other images, but for
    rounding: if it does not, it always runs as in stock, and so does one that draws random numbers. Thread-safe.

    Args:
        executor: of the model. What another model made is forgotten: one of other tensors, by a checksum of all of
            them, of another structure, or under another autocast.
        most_bytes: of what is kept for later calls; the image that was used the longest ago goes first.

    Attributes:
        num_encoded, num_reused: images that an encoder ran over, and images that were handed out without.
        num_bytes: memory of what is kept.
    """

    def __init__(self, executor: ModelExecutor, most_bytes: int = MOST_BYTES) -> None:
        self._executor, self._most_bytes, self._plan = executor, most_bytes, ChecksumPlan()
        self.num_encoded = self.num_reused = self.num_bytes = 0
        self._lock, self._attention = ProcessLock(), TowerAttention()
        self._kept: OrderedDict[tuple[Hashable, int], _Kept] = OrderedDict()
        self._last = 0
        self._numbers: Hashable = None
        self._random: set[_Kind] = set()  # what drew random numbers the last time
        self._proved: dict[_Kind, bool] = {}  # False: it runs as in stock

    def clear(self) -> None:
        """Keep no image any more."""
        with self._lock.rlock:
            self._kept.clear()
            self.num_bytes, self._plan = 0, ChecksumPlan()

    def view(self, model: nn.Module, body: str) -> nn.Module:
        """Return a view of a model whose child of the name `body` has encoders as by `through`."""
        view, inside = view_of(model, {}), view_of(model.get_submodule(body), {})
        self.through(inside)
        vars(view)["_modules"] = {**model._modules, body: inside}
        return view

    def through(self, body: nn.Module) -> None:
        """Let the encoders of a view of a model's body run over images that are not known."""
        for name in ENCODERS:
            if (method := getattr(body, name, None)) is not None:
                vars(body)[name] = self._once(name, self._attention.through(method, body), body)

    def _once(self, name: str, method: Callable[..., Any], body: nn.Module) -> Callable[..., Any]:
        signature = inspect.signature(method)
        further = [one.name for one in signature.parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]

        @wraps(method)  # generate reads the signature
        def encode(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError:
                return method(*args, **kwargs)
            for rest in further:
                arguments |= arguments.pop(rest, {})
            items = None if torch.is_grad_enabled() else divided(arguments, getattr(body, "config", None))
            if items is None:
                return method(*args, **kwargs)
            kind = _Kind(name, items.kind, any(module.training for module in body.modules()))
            if self._proved.get(kind) is False:
                return method(*args, **kwargs)
            return self._encode(kind, method, items)

        return encode

    def _encode(self, kind: _Kind, method: Callable[..., Any], items: Items) -> Any:
        """Return what `method` makes of images, running it over those that are not known."""
        def whole() -> Any:
            self._count(len(items), 0)
            return method(**items.arguments)

        keys: list[Hashable] = [(kind, key) for key in items.keys]
        version = self._version()
        first = _first_equal(keys, items)
        known = self._find({item: keys[item] for item in set(first)}, items, version)
        left = [item for item, equal in enumerate(first) if equal == item and item not in known]
        if len(left) == len(items) or kind in self._random:
            before = _generators(items.device)
            output = whole()
            if (made := self._made(kind, output, items, before)) is not None:
                self._keep(keys, made, items, left, version)
            return output
        ours = self._of_others(method, kind, items, left, known)
        if ours is not None and kind not in self._proved and ours.encoded[0].is_finite:  # NaN would prove nothing
            self._proved[kind] = self._is_proved(method, kind, items, ours.encoded[0], len(left))
        if ours is None or not self._proved.get(kind):
            return whole()
        self._count(0, len(items) - len(left))
        self._keep(keys, ours, items, left, version)

        def further() -> Any:  # this class reads more of an output than is kept of images
            self._proved[kind] = False
            return whole()

        return ours.form.joined([ours.encoded[equal] for equal in first], further)

    def _is_proved(self, method: Callable[..., Any], kind: _Kind, items: Items, first: Encoded, count: int) -> bool:
        """Return whether `method` makes the same of the first image in another place, among others, of which there are
        not `count`."""
        number = 3 if count == 2 else 2
        made = self._of_others(method, kind, items.among(number), list(range(number)))
        return made is not None and first.is_close(made.encoded[1])

    def _of_others(self, method: Callable[..., Any], kind: _Kind, items: Items, left: list[int],
                   known: Mapping[int, _Kept] = MappingProxyType({})) -> _Made | None:
        """Run `method` over the images `left`; returns what was made of them and those that are known."""
        forms, encoded = {kept.form for kept in known.values()}, {item: kept.encoded for item, kept in known.items()}
        if left:
            others, before = items.only(left), _generators(items.device)
            self._count(len(left), 0)
            try:
                made = self._made(kind, method(**others.arguments), others, before)
            except Exception:  # stock's own error is about all images
                made = None
            if made is None:
                if kind in self._random:
                    _set_generators(before, items.device)
                return None
            forms.add(made.form)
            encoded.update(zip(left, made.encoded.values(), strict=True))
        return _Made(forms.pop(), encoded) if len(forms) == 1 else None

    def _made(self, kind: _Kind, output: Any, items: Items, before: list[torch.Tensor]) -> _Made | None:
        """Return what an encoder made of each image; None if that is not known, or if it drew random numbers.

        ``before``: `_generators` before it ran.
        """
        if not all(map(torch.equal, before, _generators(items.device))):
            if kind.is_training:  # else another thread drew them
                self._random |= {kind}
            return None
        self._random.discard(kind)
        if (made := split(output, len(items))) is None:
            self._proved[kind] = False
            return None
        # A class that leaves blank images out must not take the next one's rows for theirs.
        if any(len(made[1][item].rows) for item in items.blank().nonzero()[0]):
            return None
        return _Made(made[0], dict(enumerate(made[1])))

    def _count(self, num_encoded: int, num_reused: int) -> None:
        with self._lock.rlock:
            self.num_encoded += num_encoded
            self.num_reused += num_reused

    def _version(self) -> _Version | None:
        """Return what the model is for a call of this thread, and forget images if it is known to have changed; None
        if nothing is ever kept."""
        if not self._most_bytes:
            return None
        executor, device = self._executor, self._executor.source.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None  # of this thread
        numbers = executor.watch.structure(executor.model), executor.contents(), executor.state_key(), cast
        with self._lock.rlock:
            if self._numbers != numbers:
                self.clear()
                self._numbers = numbers
            tensors = executor.tensors()
            return _Version(numbers, self._plan([*tensors.weights, *tensors.buffers]))

    def _find(self, keys: dict[int, Hashable], items: Items, version: _Version | None) -> dict[int, _Kept]:
        """Return what is kept of images, by their places in the call; forgets what another model made."""
        found: dict[int, _Kept] = {}
        with self._lock.rlock:
            if version is None or version.numbers != self._numbers:  # of another thread
                return found
            numbers: dict[Hashable, list[int]] = {}
            for key, number in self._kept:
                numbers.setdefault(key, []).append(number)
            entries = [(item, (key, number)) for item, key in keys.items() for number in numbers.get(key, ())]
            now = int(version.checksum) if entries else None
            for item, entry in entries:
                if (kept := self._kept.get(entry)) is None or item in found:
                    continue
                if int(kept.checksum) != now:
                    self._forget(entry)
                elif are_equal(kept.parts, items.parts(item)):
                    self._kept.move_to_end(entry)
                    found[item] = kept._replace(encoded=kept.encoded.map(torch.clone))
        return found

    def _keep(self, keys: list[Hashable], made: _Made, items: Items, left: list[int],
              version: _Version | None) -> None:
        """Keep what was made of the images `left`."""
        if version is None:
            return
        for key, item in ((keys[item], item) for item in left):
            # Memory of their own: they are parts of those of a batch.
            own = tuple(part.clone() for part in items.parts(item))
            kept = _Kept(own, made.form, made.encoded[item].map(torch.clone), version.checksum)
            with self._lock.rlock:
                if version.numbers != self._numbers:
                    return
                self._last += 1
                self._kept[key, self._last] = kept
                self.num_bytes += kept.num_bytes
                while self.num_bytes > self._most_bytes:
                    self._forget(next(iter(self._kept)))

    def _forget(self, entry: tuple[Hashable, int]) -> None:
        self.num_bytes -= self._kept.pop(entry).num_bytes


def _first_equal(keys: list[Hashable], items: Items) -> list[int]:
    """Return for each image the first one of the call that equals it."""
    found: list[int] = []
    distinct: dict[Hashable, list[int]] = {}
    for item, key in enumerate(keys):
        alike = distinct.setdefault(key, [])
        equal = next((other for other in alike if are_equal(items.parts(other), items.parts(item))), None)
        if equal is None:
            alike.append(item)
        found.append(item if equal is None else equal)
    return found


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators that a device's functions draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_generators(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)
