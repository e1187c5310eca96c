"""Outlines of models whose classes stand in no table of families: read from the store, or proved and laid out."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.families import SUPPORTED
from hf_paged.guards.hints import PUT_BACK, UNDO_PATCH
from hf_paged.guards.origin import package_of
from hf_paged.models.derivation import stored_layout
from hf_paged.models.derivation.contents import contents_of
from hf_paged.models.derivation.executor import OUTLINES, ModelOutline, constants_of, modules_below
from hf_paged.models.derivation.layout import Layout, lay_out
from hf_paged.models.derivation.recurrent_executor import ON_A_CPU
from hf_paged.models.derivation.rows_in_dtype import check_rows_in
from hf_paged.models.derivation.two_halves import check_two_halves
from hf_paged.models.executor import KNOWN_LAYERS
from hf_paged.models.paged_calls import implementation_of
from hf_paged.models.proof import Verdict, prove
from hf_paged.models.proof.interface import NAME
from hf_paged.models.proof.line_counts import modeling_files
from hf_paged.models.proof.prove import in_thread, patched_in
from hf_paged.models.proof.store import key_of
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent.view import keeps_states
from hf_paged.parallel.fsdp import plain_class

IN_STOCK = f"It runs in stock. Without a proof, the engine runs {', '.join(SUPPORTED)}."
_PATIENCE_S = 1.0  # before a line of progress
_refusals: WeakKeyDictionary[PreTrainedModel, Reason] = WeakKeyDictionary()


def derived(model: PreTrainedModel) -> ModelOutline | Reason:
    """Return what `derive` last returned for a model; derives now if it never did."""
    found = OUTLINES.get(model) or _refusals.get(model)
    return derive(model) if found is None else found


def derive(model: PreTrainedModel) -> ModelOutline | Reason:
    """Return the outline by which a model runs, as it is now, or why its class or config is not proved to run."""
    known = OUTLINES.get(model)
    if known is not None and _holds(known, model):
        return known
    try:
        found = _derive(model)
    except Exception as error:  # stock runs what it can
        found = Reason("{} is not proved to run on the paged engine: {}", type(model).__name__,
                       f"its proof failed ({type(error).__name__}: {str(error)[:160]})", remedy=IN_STOCK)
    if isinstance(found, Reason):
        OUTLINES.pop(model, None)
        _refusals[model] = found
    else:
        _refusals.pop(model, None)
        OUTLINES[model] = found
    return found


def _holds(outline: ModelOutline, model: PreTrainedModel) -> bool:
    is_of_dtype = outline.dtype in (None, model.get_input_embeddings().weight.dtype)
    return is_of_dtype and outline.constants == constants_of(model, _called(outline.classes))


def _derive(model: PreTrainedModel) -> ModelOutline | Reason:
    cls = next((kind for kind in plain_class(type(model)).__mro__ if package_of(kind) == "transformers"), None)
    if cls is None or not cls.__module__.startswith("transformers.models."):
        return Reason("{} is no causal LM of transformers", type(model).__name__, remedy=IN_STOCK)
    attention = implementation_of(model.config.get_text_config(decoder=True))
    if (place := patched_in(model, attention)) is not None:
        return Reason("{} is patched", place, remedy=UNDO_PATCH)
    if keeps_states(model.config):
        device, is_text = model.device.type, model.config.get_text_config(decoder=True) is model.config
        if device not in ("cpu", "meta") or not is_text:
            return Reason("{} keeps a recurrent state, which steps {} do not have yet", cls.__name__,
                          f"on {device}" if is_text else "of image-text models", remedy=ON_A_CPU)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(embedding, torch.Tensor):
        return Reason("{} is no causal LM of transformers with a table of embeddings", cls.__name__, remedy=IN_STOCK)
    subject = _Subject(cls, copy.deepcopy(model.config), attention, embedding.dtype)
    key = f"layout-{subject.dtype}-{key_of(cls, model.config, str(attention), modeling_files(model))}"
    if (known := stored_layout.read(key)) is not None:
        verdict, layout = known
        if layout is None or _difference(layout, model) is None:
            return _found(model, subject, verdict, layout)
    with _progress(cls.__name__):
        verdict, layout = _proved(subject, key)
    return _found(model, subject, verdict, layout)


class _Subject(NamedTuple):
    """What a proof is about."""

    cls: type[PreTrainedModel]
    config: Any
    attention: Any
    dtype: torch.dtype


def _proved(subject: _Subject, key: str) -> tuple[Verdict, Layout | None]:
    """Prove and lay out models of a class and a config, and store that."""
    verdict = prove(subject.cls, subject.config, subject.attention)
    if verdict.outcome != "proved":  # `prove` stores it
        return verdict, None
    made: tuple[Verdict, Layout | None] | str = in_thread(lambda: _laid_out(subject, verdict))
    if isinstance(made, str):  # an error, which may be the machine's
        return Verdict("refused", made), None
    stored_layout.write(key, *made)
    return made


def _laid_out(subject: _Subject, verdict: Verdict) -> tuple[Verdict, Layout | None] | str:
    cls, config, attention, dtype = subject
    try:
        layout = lay_out(cls, config, dtype)
        layout = replace(layout, has_stock_cache=check_two_halves(cls, config, attention))
        check_rows_in(dtype, cls, config, attention)
    except Refused as refusal:
        return Verdict("refused", str(refusal)), None
    except Exception as error:
        return f"its layout cannot be read ({type(error).__name__}: {str(error)[:160]})"
    return verdict, layout


def _found(model: PreTrainedModel, subject: _Subject, verdict: Verdict,
           layout: Layout | None) -> ModelOutline | Reason:
    cls = subject.cls
    if verdict.outcome == "open":
        return Reason("{} is not proved to run on the paged engine: its numbers are stock's, but code that the proof "
                      "did not reach may change them: {}", cls.__name__, verdict.reason, remedy=IN_STOCK)
    if layout is None:
        return Reason("{} is not proved to run on the paged engine: {}", cls.__name__, verdict.reason, remedy=IN_STOCK)
    if (difference := _difference(layout, model) or _other_attention(layout, model, subject.attention)) is not None:
        return Reason("{}, unlike in a new model of its config", difference, remedy=PUT_BACK)
    limits = [limit for limit in (layout.positions, verdict.max_length) if limit is not None]
    return ModelOutline(cls, layout.body, layout.calls, layout.classes, layout.num_logits, min(limits),
                        constants_of(model, _called(layout.classes)), verdict.max_step_tokens, subject.dtype,
                        layout.has_stock_cache, layout.states, verdict.whole_prompts)


def _called(classes: Any) -> frozenset[str]:
    return frozenset(path for path, kind in classes.items() if kind in KNOWN_LAYERS)


def _difference(layout: Layout, model: nn.Module) -> str | None:
    """Return which module differs from a new model's, in its class or in what it holds, or None.

    A layer of a known kind may be one of another class, with contents of its own (quantized, LoRA).
    """
    called, contents = _called(layout.classes), contents_of(model)
    modules = dict(modules_below(model, called))
    for path in sorted(modules.keys() | layout.classes.keys()):
        module, kind = modules.get(path), layout.classes.get(path)
        if type(module) is not kind:
            if path in called and module is not None:
                continue
            return f"{path} is " + ("missing" if module is None else f"a {type(module).__name__}")
        if (got := contents[path]) != (wanted := layout.contents[path]):
            name = min(name for name in got.keys() | wanted.keys() if got.get(name, ...) != wanted.get(name, ...))
            return f"{path} holds {name}={got.get(name)!r:.80}"
    return None


def _other_attention(layout: Layout, model: nn.Module, attention: Any) -> str | None:
    """Return which module attends by another implementation than the one that the proof is about, or None."""
    for call in layout.calls:
        config: Any = getattr(model.get_submodule(call.module), "config", None)
        if config is not None and (name := implementation_of(config)) != attention:
            return f"{call.module} attends by {name!r}, the model by {attention!r}"
    return None


@contextmanager
def _progress(name: str) -> Iterator[None]:
    """Show a line of progress in a ``with`` block that takes long, and nothing that transformers logs of clones."""
    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(_is_no_proof)
    bars: list[tqdm] = []
    text = f"hf_paged: proving that {name} runs on pages with stock's numbers"
    timer = threading.Timer(_PATIENCE_S, lambda: bars.append(tqdm(desc=text, leave=False, bar_format="{desc} ...")))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for handler in handlers:
            handler.removeFilter(_is_no_proof)
        for bar in bars:
            bar.close()


def _is_no_proof(record: logging.LogRecord) -> bool:
    return record.threadName != NAME
