"""Proof that a decoder class, under a config, gives stock's numbers when it runs packed and paged."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.guards.original_classes import patched_class, patched_entry
from hf_paged.models.proof.clone import on_meta
from hf_paged.models.proof.interface import ProofThread, StoppedError
from hf_paged.models.proof.line_counts import modeling_files
from hf_paged.models.proof.numbers import numbers_of
from hf_paged.models.proof.outline import check_alike, outline
from hf_paged.models.proof.reduced import reduced
from hf_paged.models.proof.store import get_or_make, key_of
from hf_paged.models.proof.verdict import Refused, Verdict

ATTENTION = ("sdpa", "eager")


def prove(model_or_class: PreTrainedModel | type[PreTrainedModel], config: PreTrainedConfig | None = None,
          attention: str = "sdpa") -> Verdict:
    """Return whether models of this class and config run packed and paged with stock's numbers.

    The proof runs small random clones on the CPU, in a thread of its own: the model, its config and the settings of
    the calling thread stay as they are. An error within ends as a verdict; an interrupt of the caller ends the proof.
    """
    cls = model_or_class if isinstance(model_or_class, type) else type(model_or_class)
    try:
        own: Any = copy.deepcopy(getattr(model_or_class, "config", None) if config is None else config)
    except Exception as error:
        return Verdict("refused", _error("its config cannot be copied", error))
    if attention not in ATTENTION:
        return Verdict("refused", f"attention implementation {attention!r} does not run in float64 on the CPU; "
                                  f"expected one of {ATTENTION}")
    if torch.get_default_dtype() is not torch.float32:
        return Verdict("refused", f"torch's default dtype is {torch.get_default_dtype()}; expected torch.float32")
    return in_thread(lambda: _proof(cls, own, attention))


def _proof(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> Verdict:
    try:
        small = reduced(config)
        full_key, small_key = _keys(on_meta(cls, small), config, small, attention)
        return get_or_make(full_key, lambda: _timed(lambda: _whole(cls, config, small, attention, small_key)))
    except Exception as error:  # such a verdict is not stored: it may be the machine's
        return Verdict("refused", _error("its outline without weights, or a small clone, does not run", error))


def _keys(model: PreTrainedModel, config: PreTrainedConfig, small: PreTrainedConfig,
          attention: str) -> tuple[str | None, str | None]:
    """Return the keys of verdicts on a config and on its clones', which all sizes share; None for patched code."""
    if patched_in(model.modules(), attention) is not None:
        return None, None
    files, cls = modeling_files(model.modules()), type(model)
    return f"model-{key_of(cls, config, attention, files)}", f"clone-{key_of(cls, small, attention, files)}"


def patched_in(modules: Iterable[nn.Module], attention: Any) -> str | None:
    """Return what is patched of the code that these modules and this attention implementation run, or None."""
    if (place := patched_class(sorted({type(module) for module in modules}, key=str))) is not None:
        return place
    entries = (registry.get(attention) for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS))
    return next((place for entry in entries if entry is not None and (place := patched_entry(entry)) is not None), None)


def _whole(cls: type[PreTrainedModel], config: PreTrainedConfig, small: PreTrainedConfig, attention: str,
           small_key: str | None) -> Verdict:
    """Return the verdict on a config: its clone's, if the full size does the same as the clone."""
    check_alike(outline(cls, config), outline(cls, small))
    return get_or_make(small_key, lambda: _timed(lambda: numbers_of(cls, small, attention)))


def _timed(make: Callable[[], Verdict]) -> Verdict:
    """Return a verdict, also of a refusal, with the CPU time of this thread that it took."""
    begin = time.thread_time()
    try:
        verdict = make()
    except Refused as refusal:
        verdict = Verdict("refused", str(refusal))
    return replace(verdict, seconds=round(time.thread_time() - begin, 2))


def _error(what: str, error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} ({type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {str(error)[:160]})"


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread, without the modes and trace functions of this one; returns its result."""
    results: list[Any] = []

    def run() -> None:
        with suppress(StoppedError):
            results.append(work())

    thread = ProofThread(run)
    thread.start()
    try:
        thread.join()
    finally:
        thread.stopped.set()
    return results[0]
