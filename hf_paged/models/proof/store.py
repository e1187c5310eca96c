"""Stored verdicts, in the user's cache directory: one JSON file for each key, written at once or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from hf_paged.files import alone, write_whole
from hf_paged.models.proof.verdict import Verdict

LONGEST_WAIT_S = 60.0  # for another process that makes the same proof
# Packages that modeling code takes another way for.
_ASKED_FOR = ("causal_conv1d", "fla", "mamba_ssm", "mambapy", "xielu")
# Fields of a config that say where it comes from.
_ORIGIN = ("_name_or_path", "transformers_version", "architectures")


def folder() -> Path:
    """Return the folder of stored verdicts: in `HF_PAGED_CACHE`, `XDG_CACHE_HOME/hf_paged` or `~/.cache/hf_paged`."""
    if given := os.environ.get("HF_PAGED_CACHE"):
        return Path(given).expanduser() / "proofs"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_paged" / "proofs"


def key_of(cls: type, config: PreTrainedConfig, attention: str, files: frozenset[str]) -> str:
    """Return a hash of all that a verdict depends on: versions, code of `files` and of the proof, config, attention."""
    about = [transformers.__version__, torch.__version__, sys.version_info[:2], _proof_source(),
             sorted(_hash_of(Path(file)) for file in files), f"{cls.__module__}.{cls.__qualname__}", attention,
             type(config).__qualname__, values_of(config)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def values_of(config: PreTrainedConfig) -> str:
    """Return the fields of a config as JSON, without those that say where it comes from."""
    values = {name: value for name, value in config.to_dict().items() if name not in _ORIGIN}
    return json.dumps(values, sort_keys=True, default=str)


def get_or_make(key: str | None, make: Callable[[], Verdict]) -> Verdict:
    """Return the stored verdict of a key, or make and store it; a key of None is not stored."""
    if key is None:
        return make()
    if (known := read(key)) is not None:
        return known
    with turn(key):
        if (known := read(key)) is None:
            known = make()
            write(key, known)
    return known


def read(key: str) -> Verdict | None:
    """Return the verdict of a key, or None if there is none, or a damaged one."""
    return Verdict.from_json(read_values(key))


def write(key: str, verdict: Verdict) -> None:
    """Store a verdict."""
    write_values(key, verdict.to_json())


def read_values(key: str) -> Any:
    """Return what is stored for a key, or None if there is nothing, or not what was written."""
    try:
        stored = json.loads((folder() / f"{key}.json").read_text())
        return stored["values"] if stored["digest"] == _digest(stored["values"]) else None
    except (OSError, ValueError, TypeError, LookupError, RuntimeError):  # RuntimeError: the user has no home directory
        return None


def write_values(key: str, values: Any) -> None:
    """Store values; a directory that cannot be written costs the next process its own proof."""
    with contextlib.suppress(OSError, RuntimeError):
        write_whole(folder() / f"{key}.json", json.dumps({"digest": _digest(values), "values": values}))


@contextlib.contextmanager
def turn(key: str) -> Iterator[None]:
    """Wait while another process or thread works on a key, at most `LONGEST_WAIT_S`, in front of a ``with`` block."""
    path = None
    with contextlib.suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        path = folder() / f"{key}.lock"
    with alone(path, LONGEST_WAIT_S) as is_held:
        try:
            yield
        finally:
            if path is not None and is_held:
                path.unlink(missing_ok=True)


def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@functools.cache
def _proof_source() -> list[str]:
    """Return hashes of the code that proves, lays out and runs models, and which of `_ASKED_FOR` are installed."""
    package, layers = Path(__file__).parents[2], ("guards", "models", "parallel", "runner")
    found = [name for name in _ASKED_FOR if find_spec(name) is not None]
    return found + [_hash_of(file) for layer in layers for file in sorted((package / layer).rglob("*.py"))]
