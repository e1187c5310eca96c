"""Outlines of models of no fused family: read from the store, or proved and laid out."""

from __future__ import annotations

import copy
import hashlib
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
from hf_paged.guards.hints import OWN_ATTENTION, UNDO_PATCH
from hf_paged.guards.origin import package_of
from hf_paged.models.derivation import stored_layout
from hf_paged.models.derivation.executor import OUTLINES, ModelOutline, constants_of, modules_below, precision_of
from hf_paged.models.derivation.layout import Layout, contents_of, lay_out
from hf_paged.models.derivation.over_ranks import part_of
from hf_paged.models.derivation.recurrent_executor import why_no_states
from hf_paged.models.derivation.rows_in_dtype import Precision, RowsIn, check_rows_in
from hf_paged.models.derivation.two_halves import check_two_halves
from hf_paged.models.executor import KNOWN_LAYERS
from hf_paged.models.paged_calls import implementation_of, is_flash, why_not_attention
from hf_paged.models.proof import Verdict, prove
from hf_paged.models.proof.interface import NAME
from hf_paged.models.proof.line_counts import modeling_files
from hf_paged.models.proof.prove import ATTENTION, in_thread, patched_in
from hf_paged.models.proof.store import key_of, turn
from hf_paged.models.proof.verdict import Refused
from hf_paged.models.recurrent.view import keeps_states
from hf_paged.parallel.fsdp import plain_class
from hf_paged.parallel.group import group_of
from hf_paged.parallel.replica import replica_of

IN_STOCK = "It runs in stock. The page docs/models.md lists the classes that run on the engine."
_AGREE = ("A module was exchanged, or the config changed and the modules did not. Put back what changed, or "
          "load the model anew.")
_PATIENCE_S = 1.0  # before a line of progress
_refusals: WeakKeyDictionary[PreTrainedModel, Reason] = WeakKeyDictionary()


def derived(model: PreTrainedModel) -> ModelOutline | Reason:
    """Return what `derive` last returned for a model; derives now if it never did."""
    found = OUTLINES.get(model) or _refusals.get(model)
    return derive(model) if found is None else found


def derive(model: PreTrainedModel) -> ModelOutline | Reason:
    """Return the outline by which a model runs, as it is now, or why its class or config is not proved to run."""
    known, replica = OUTLINES.get(model), replica_of(model)
    whole = model if replica is None else replica.model
    if known is not None and _holds(known, whole):
        return known
    try:
        found = (None if replica is None else replica.refresh()) or _derive(whole)
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
    is_of_dtype = not outline.states or outline.dtype == model.get_input_embeddings().weight.dtype
    return is_of_dtype and outline.constants == constants_of(model, _called(outline.classes))


def rows_in(model: PreTrainedModel, precision: Precision) -> RowsIn:
    """Return whether rows of a step of a model may depend on each other in this precision, and dtypes of states."""
    subject = _subject_of(model)
    if isinstance(subject, Reason):
        return RowsIn(str(subject))
    key = f"rows-{hashlib.sha256(str(precision).encode()).hexdigest()[:16]}-{subject.key}"
    if (found := stored_layout.read_rows(key)) is None:
        with _progress(subject.cls.__name__):
            made: RowsIn | str = in_thread(lambda: _rows_in(precision, subject))
        if isinstance(made, str):  # an error, which may be the machine's
            return RowsIn(made)
        stored_layout.write_rows(key, found := made)
    return found


def _rows_in(precision: Precision, subject: _Subject) -> RowsIn | str:
    try:
        return check_rows_in(precision, subject.cls, subject.config, subject.attention)
    except Refused as refusal:
        return RowsIn(str(refusal))
    except Exception as error:
        return f"its clone does not run ({type(error).__name__}: {str(error)[:160]})"


def _derive(model: PreTrainedModel) -> ModelOutline | Reason:
    subject = _subject_of(model)
    if isinstance(subject, Reason):
        return subject
    if (known := stored_layout.read(subject.key)) is None or not _fits(known[1], model):
        with _progress(subject.cls.__name__), turn(subject.key):  # one of the ranks proves, and the others read
            if (again := stored_layout.read(subject.key)) in (None, known):
                again = _proved(subject)
        known = again
    assert known is not None
    found = _found(model, subject, *known)
    if isinstance(found, Reason):
        return found
    precision = precision_of(model, _called(found.classes))
    return found._replace(precisions={precision: rows_in(model, precision)})


def _fits(layout: Layout | None, model: nn.Module) -> bool:
    return layout is None or _difference(layout, model) is None


class _Subject(NamedTuple):
    """What a proof is about."""

    cls: type[PreTrainedModel]
    config: Any
    attention: str
    dtype: torch.dtype  # of the embedding
    num_ranks: int
    key: str
    attention_of_model: str  # which `attention` computes the same as


def _subject_of(model: PreTrainedModel) -> _Subject | Reason:
    """Return what a proof of a model is about, or why there can be none."""
    cls = next((kind for kind in plain_class(type(model)).__mro__ if package_of(kind) == "transformers"), None)
    if cls is None or not cls.__module__.startswith("transformers.models."):
        return Reason("{} is no causal LM of transformers", type(model).__name__, remedy=IN_STOCK)
    name = implementation_of(model.config.get_text_config(decoder=True))
    if (reason := why_not_attention(name)) is not None:
        return reason
    # Layers of other packages (LoRA, quantized) stand for known layers, and are judged as those of fused families.
    own = [module for module in model.modules() if package_of(type(module)) in ("torch", "transformers")]
    if (place := patched_in(own, name)) is not None:
        return Reason("{} is patched", place, remedy=UNDO_PATCH)
    if keeps_states(model.config) and (reason := why_no_states(model, cls)) is not None:
        return reason
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(embedding, torch.Tensor):
        return Reason("{} is no causal LM of transformers with a table of embeddings", cls.__name__, remedy=IN_STOCK)
    num_ranks = group_of(model).size
    ranks = f"{num_ranks}-" * (num_ranks > 1)
    dtype = f"{embedding.dtype}-" * keeps_states(model.config)  # which the dtypes of states depend on
    key = f"layout-{ranks}{dtype}{key_of(cls, model.config, str(name), modeling_files(own))}"
    config, attention = copy.deepcopy(model.config), str(name)
    if name not in ATTENTION:
        if not is_flash(name) and name != "flex_attention":  # those carry all that eager attention carries
            return Reason("attention implementation {}, with which no proof runs", repr(name), remedy=OWN_ATTENTION)
        config._attn_implementation = attention = "eager"
    return _Subject(cls, config, attention, embedding.dtype, num_ranks, key, str(name))


def _proved(subject: _Subject) -> tuple[Verdict, Layout | None]:
    """Prove and lay out models of a class and a config, and store that."""
    verdict = prove(subject.cls, subject.config, subject.attention)
    if verdict.outcome != "proved":  # `prove` stores it
        return verdict, None
    made: tuple[Verdict, Layout | None] | str = in_thread(lambda: _laid_out(subject, verdict))
    if isinstance(made, str):  # an error, which may be the machine's
        return Verdict("refused", made), None
    stored_layout.write(subject.key, *made)
    return made


def _laid_out(subject: _Subject, verdict: Verdict) -> tuple[Verdict, Layout | None] | str:
    cls, config, attention, dtype, num_ranks, _, name = subject
    try:
        layout = lay_out(cls, config, dtype=dtype, by_windows=is_flash(name))
        layout = replace(layout, **check_two_halves(cls, config, attention)._asdict())
        if num_ranks > 1:
            layout = part_of(layout, cls, config, attention, num_ranks)
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
    difference = _difference(layout, model) or _other_attention(layout, model, subject.attention_of_model)
    if difference is not None:
        return Reason("{}, unlike in a new model of its config", difference, remedy=_AGREE)
    proved = layout.longest if verdict.max_length is None else verdict.max_length
    return ModelOutline(cls, layout.body, layout.calls, layout.classes, layout.num_logits,
                        min(layout.positions, proved), min(layout.longest, proved),
                        constants_of(model, _called(layout.classes)), verdict.max_step_tokens, None,
                        layout.has_stock_cache, layout.ignores_train_mode, layout.states, verdict.whole_prompts,
                        subject.dtype)


def _called(classes: Any) -> frozenset[str]:
    return frozenset(path for path, kind in classes.items() if kind in KNOWN_LAYERS)


def _difference(layout: Layout, model: nn.Module) -> str | None:
    """Return which module differs from a new model's, in its class or in what it holds, or None.

    A layer of a known kind may be one of another class, or hold more than a new one (quantized, LoRA).
    """
    called, contents = _called(layout.classes), contents_of(model)
    modules = dict(modules_below(model, called))
    for path in sorted(modules.keys() | layout.classes.keys()):
        module, kind = modules.get(path), layout.classes.get(path)
        if type(module) is not kind:
            if path in called and module is not None:
                continue
            return f"{path} is " + ("missing" if module is None else f"a {type(module).__name__}")
        got, wanted = contents[path], layout.contents[path]
        names = got.keys() & wanted.keys() if path in called else got.keys() | wanted.keys()
        if unlike := [name for name in names if got.get(name, ...) != wanted.get(name, ...)]:
            return f"{path} holds {min(unlike)}={got.get(min(unlike))!r:.80}"
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
