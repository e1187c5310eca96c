"""What earlier processes of a model and its settings needed: kernels and shapes of steps, in a file beside Triton's.

An engine reads the file before it is ready, and adds to it what its requests needed. The file is a hint: a missing or
damaged one, or one of another program, counts as empty, and one that cannot be written is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hf_paged.config import OF_EXECUTOR, PagedConfig
from hf_paged.device.cuda import compute_capability
from hf_paged.files import write_whole
from hf_paged.kernels._triton import triton
from hf_paged.kernels.attention.types import GroupedConfig
from hf_paged.kernels.build import kernel_log
from hf_paged.models import KVSpec, ModelExecutor
from hf_paged.runner.step_shape import GroupedTiles, StepShape

_FORMAT = 1
_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 512  # of variants, and of shapes
_MOST_REPEATED = 64
_IDLE_S = 10.0
# Fields of PagedConfig that decide which kernels and shapes there are.
_FIELDS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "group_prefixes", "enforce_eager",
           "attention_backend", *OF_EXECUTOR, "all_reduce", "speculation")
_NO_IDENTITY = ("_name_or_path", "transformers_version")


def manifest_path(executor: ModelExecutor, spec: KVSpec, config: PagedConfig) -> Path | None:
    """Return the path of the manifest of a model under a config; None without a GPU or without Triton's cache."""
    if spec.device.type != "cuda" or triton is None or triton.knobs.runtime.interpret:
        return None
    model = {name: value for name, value in executor.config.to_dict().items() if name not in _NO_IDENTITY}
    own_version = sys.modules["hf_paged"].__version__
    identity = [_FORMAT, own_version, triton.__version__, torch.__version__, compute_capability(spec.device),
                model, str(spec.compute_dtype), executor.group.size,
                {name: value for name, value in dataclasses.asdict(config).items()
                 if name in _FIELDS and not (spec.states and name == "max_num_seqs")}]  # which free memory bounds
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / "hf_paged" / f"{digest[:32]}.json"


class Manifest:
    """The manifest of one engine.

    Args:
        path: the file; None for an engine that has none.
        is_read_only: another rank writes the file.

    Attributes:
        variants: records of kernels that earlier processes needed, the latest process's first.
        shapes: shapes of steps that they ran, with numbers of uses.
        uses: shapes of steps that this engine runs, which `StepGraphs` counts.
    """

    def __init__(self, path: Path | None, *, is_read_only: bool = False) -> None:
        self._path = None if is_read_only else path
        self.uses: Counter[StepShape] = Counter()
        self.variants, self.shapes = ([], {}) if path is None else _read(path)
        self._saved = self._extent()

    def save(self) -> None:
        """Write the file, if this process needed anything that it does not have."""
        if self._path is None or (extent := self._extent()) == self._saved:
            return
        self._saved = extent
        others, _ = _read(self._path)  # another process may have written it
        variants = list(dict.fromkeys([*self._own_variants(), *self.variants, *others]))[:_MOST_ENTRIES]
        # Uses of earlier processes count half, so that shapes of work that is over go first.
        shapes = Counter({shape: number // 2 for shape, number in self.shapes.items()}) + Counter(dict(self.uses))
        found = {"format": _FORMAT, "variants": variants,
                 "shapes": [[_as_json(shape), number] for shape, number in shapes.most_common(_MOST_ENTRIES)]}
        with suppress(OSError):
            write_whole(self._path, json.dumps(found))

    def repeated(self) -> list[StepShape]:
        """Return the steps that earlier processes repeated often enough to capture them, the most frequent first."""
        by_uses = Counter(self.shapes).most_common()
        return [shape for shape, number in by_uses if number > shape.num_first_runs][:_MOST_REPEATED]

    def has_news(self) -> bool:
        """Return whether `save` would write."""
        return self._path is not None and self._extent() != self._saved

    def _own_variants(self) -> list[str]:
        """Return what this process needed besides what it loaded by the manifest, the latest first."""
        known = set(self.variants)
        return [record for record in reversed(kernel_log.variants()) if record not in known]

    def _extent(self) -> tuple[int, int]:
        return len(self._own_variants()), self.uses.total()


class IdleSaver:
    """Saver of an engine's manifest: behind a while of idleness, and when the process ends.

    Args:
        owner: whose end is that of the engine.
    """

    def __init__(self, owner: object, manifest: Manifest) -> None:
        self._manifest = manifest
        self._timer: threading.Timer | None = None
        self._end = weakref.finalize(owner, manifest.save)

    def note(self, is_busy: bool) -> None:
        """Note whether the engine has work; cheap, for every step."""
        if is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_busy and self._timer is None and self._manifest.has_news():
            self._timer = threading.Timer(_IDLE_S, self._manifest.save)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Save now, and never again."""
        self.note(is_busy=True)
        self._end()


def _read(path: Path) -> tuple[list[str], dict[StepShape, int]]:
    """Return variants and shapes of a file; of one that is none, nothing."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return [], {}
        found = json.loads(path.read_text())
        if found["format"] != _FORMAT:
            return [], {}
        variants = [record for record in found["variants"][:_MOST_ENTRIES] if isinstance(record, str)]
        return variants, {_of_json(shape): int(number) for shape, number in found["shapes"][:_MOST_ENTRIES]}
    except Exception:
        return [], {}


def _as_json(shape: StepShape) -> dict[str, Any]:
    """Return the fields of a shape that differ from their defaults; ``after`` belongs to this process alone."""
    default = StepShape(shape.kind)
    given = {name: value for name, value in shape._asdict().items() if value != getattr(default, name)}
    return {"kind": shape.kind, **{name: sorted(value) if isinstance(value, frozenset) else value
                                   for name, value in given.items() if name != "after"}}


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "kind": str, "rows": int, "tokens": int, "prompts": int, "stages": frozenset, "scored": tuple, "named": bool,
    "with_logits": bool, "long": bool, "queued": bool, "one_launch": bool,
    "tiles": lambda given: GroupedTiles(int(given[0]), GroupedConfig(*given[1])),
    "decode_tiles": lambda given: GroupedTiles(int(given[0]), GroupedConfig(*given[1])),
}


def _of_json(given: dict[str, Any]) -> StepShape:
    return StepShape(**{name: _READERS[name](value) for name, value in given.items()})
