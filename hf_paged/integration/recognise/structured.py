"""Structured output in `model.generate`: hf_paged's logits processor, and the processors of xgrammar and Outlines.

A call with one of these processors runs natively, with a matcher for each row. In lockstep and in stock they are
processors like any others.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged.engine.engine import Engine
from hf_paged.engine.features.grammars import BARRED
from hf_paged.engine.structured.mask_maker import MaskMaker
from hf_paged.engine.structured.matchers import Grammar, Matcher, OutlinesIndex, XGrammar
from hf_paged.errors import Reason
from hf_paged.integration.recognise.processors import is_mask, is_warper
from hf_paged.options.settings import token_id_tuple
from hf_paged.options.structured import Structured, read_structured
from hf_paged.sampling.token_mask import mask_tokens

_ONE_EACH = ("A processor with a grammar runs natively where it is new, alone of its kind and given as "
             "`logits_processor=`, with a grammar for all rows or one a row, whose stop tokens are among the call's "
             "EOS. Otherwise it runs in lockstep.")


class Form(NamedTuple):
    """The form that one row's output must have: `structured`, if it was given by the caller, and the grammar."""

    structured: Structured | None
    grammar: Grammar | None


NO_FORM = Form(None, None)


class StructuredProcessor(LogitsProcessor):
    """A logits processor for one call that masks tokens which the forms of outputs do not allow.

    It supports all decoding methods of transformers: rows may be reordered, copied and cut back.

    Args:
        forms: the form of each prompt; the rows are equally many copies of each prompt, in order.
    """

    def __init__(self, forms: list[Form]) -> None:
        self.forms = forms
        self.eos: tuple[int, ...] = ()  # the call's EOS tokens, set by `tell_eos`
        self.draws: bool | None = None  # each row gets a token at each step, unlike beams and drafts, which may end
        self._width: int | None = None  # of the padded prompts
        self._known: dict[tuple[int, tuple[int, ...]], Matcher | None] = {}
        self._masks: MaskMaker | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self._width is None:
            self._width = input_ids.shape[1]
            self._masks = MaskMaker(scores.shape[1], scores.device)
        assert self._masks is not None
        copies = max(1, len(input_ids) // len(self.forms))
        made = [tuple(row) for row in input_ids[:, self._width :].tolist()]
        keys = [(row // copies, tokens) for row, tokens in enumerate(made)]
        known = {key: self._matcher(*key) for key in keys}
        matchers = [None if (matcher := known[key]) is None or matcher.is_over else matcher for key in keys]
        self._known = known
        if not any(matchers):
            return scores
        masks = self._masks.make(matchers).to(scores.device)
        if scores.is_cuda:
            torch.cuda.current_stream(scores.device).synchronize()  # else the next masks overwrite the copy's source
        masked: Any = mask_tokens(scores.clone(), masks)
        if self.draws:
            best = masked.amax(dim=-1).tolist()
            if any(matcher is not None and most == -math.inf for matcher, most in zip(matchers, best, strict=True)):
                raise ValueError(f"structured: nothing that the grammar allows can follow; {BARRED}")
        return masked

    def _matcher(self, prompt: int, tokens: tuple[int, ...]) -> Matcher | None:
        """Return the matcher of this output of a prompt; None if it has no grammar, or one that does not allow the
        output (padding, tokens of a failed draft)."""
        form = self.forms[prompt]
        if form.grammar is None:
            return None
        if (prompt, tokens) in self._known:
            return self._known[prompt, tokens]
        before = self._known.get((prompt, tokens[:-1])) if tokens else None
        if isinstance(form.grammar, XGrammar) and before is not None:
            matcher = before.fork()  # type: ignore[attr-defined]
            return matcher if matcher.accept(tokens[-1]) else None
        matcher = form.grammar.matcher(self.eos)
        return matcher if all(map(matcher.accept, tokens)) else None


def with_structure(engine: Engine, structured: Any, args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> LogitsProcessorList:
    """Return the processors of a `model.generate` call with these arguments, and one that carries `structured=` out.

    Args:
        structured: the caller's argument, or a `Form` with its grammar.

    Raises:
        ValueError, TypeError, ImportError: as `Engine.add_request`.
    """
    inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids", kwargs.get("inputs_embeds")))
    num_prompts = len(inputs) if isinstance(inputs, torch.Tensor) else 1
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None and engine.tokenizer is None:
        raise ValueError(f"structured={structured!r:.200}: expected tokenizer= beside it, by which texts become tokens")
    is_one = not isinstance(structured, (list, tuple)) or isinstance(structured, (Structured, Form))
    given = [structured] * num_prompts if is_one else structured
    if len(given) != num_prompts:
        raise ValueError(f"structured: a list of {len(given)} for {num_prompts} prompts; expected one, or one per "
                         "prompt")
    forms = []
    for one in given:
        if not isinstance(one, Form):
            read = read_structured(one)
            one = NO_FORM if read is None else Form(read, engine.grammar_of(read, tokenizer))
        forms.append(one)
    return LogitsProcessorList([*(kwargs.get("logits_processor") or ()), StructuredProcessor(forms)])


def tell_eos(processors: Iterable[Any], criteria: Iterable[Any], *, draws: bool = False) -> None:
    """Set the EOS tokens of a call in its `StructuredProcessor`, and whether each row gets a token at each step."""
    for processor in processors:
        if type(processor) is StructuredProcessor:
            ends = [token_id_tuple(c.eos_token_id) for c in criteria if hasattr(c, "eos_token_id")]
            processor.eos = tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))
            if processor.draws is None:  # else an assistant draws drafts with it
                processor.draws = draws


def split_forms(engine: Engine, given: Any, num_rows: int,
                eos: tuple[int, ...]) -> tuple[Any, list[Form]] | Reason:
    """Return the processors of a call without the one that has grammars, and each row's form of the output.

    Returns a reason if the engine cannot carry that processor out.
    """
    found = [(place, forms) for place, p in enumerate(given) if (forms := _forms(p, num_rows, engine, eos)) is not None]
    if not found:
        return given, [NO_FORM] * num_rows
    [(place, forms), *others] = found
    kind = type(given[place]).__name__
    if others or isinstance(forms, Reason):
        return forms if isinstance(forms, Reason) else Reason(f"more than one {kind}", remedy=_ONE_EACH)
    before, after = given[:place], given[place + 1 :]
    if any(is_warper(p) for p in before) or not all(is_warper(p) or is_mask(p) for p in after):
        return Reason(f"a {kind} in another place than stock's for processors of the caller", remedy=_ONE_EACH)
    return type(given)([*before, *after]), forms


def _forms(processor: Any, num_rows: int, engine: Engine, eos: tuple[int, ...]) -> list[Form] | Reason | None:
    """Return every row's form, a reason why the engine cannot use it, or None for a processor without grammars."""
    if type(processor) is StructuredProcessor:
        copies = num_rows // len(processor.forms)
        return [processor.forms[row // copies] for row in range(num_rows)]
    for module, name, read in _KNOWN:
        owner = sys.modules.get(module)
        if owner is not None and type(processor) is getattr(owner, name, None):
            grammars = read(processor, num_rows, engine.num_logits, eos) if _is_own(owner, type(processor)) else None
            if grammars is None or engine.group.is_parallel:
                return Reason(f"a {name} of the caller's own", remedy=_ONE_EACH)
            return [Form(None, grammar) for grammar in grammars]
    return None


def _is_own(module: Any, kind: type) -> bool:
    """Return whether all methods of a class are defined in its module's file, so that none is patched."""
    return all(getattr(value, "__module__", None) == module.__name__ and value.__code__.co_filename == module.__file__
               for value in vars(kind).values() if hasattr(value, "__code__"))


def _compiled(compiled: Any, num_rows: int, num_logits: int, eos: tuple[int, ...]) -> list[Grammar] | None:
    rows = list(compiled) * (num_rows if len(compiled) == 1 else 1)
    if len(rows) != num_rows:
        return None
    for info in {id(one): one.tokenizer_info for one in rows}.values():
        stops = info.stop_token_ids
        if not stops or not {*stops} <= {*eos} or info.vocab_size < num_logits:
            return None
        if -(-info.vocab_size // 32) != -(-num_logits // 32):
            return None
    made = {id(one): XGrammar(one, keeps_stop_tokens=True) for one in rows}
    return [made[id(one)] for one in rows]


_Reader = Callable[[Any, int, int, tuple[int, ...]], "list[Grammar] | None"]
_KNOWN: tuple[tuple[str, str, _Reader], ...] = (
    ("xgrammar.contrib.hf", "LogitsProcessor", lambda processor, *rows:
     None if processor.matchers or processor.prefilled else _compiled(processor.compiled_grammars, *rows)),
    ("outlines.backends.xgrammar", "XGrammarLogitsProcessor", lambda processor, *rows:
     _compiled([processor.compiled_grammar], *rows) if processor.is_first_token else None),
    ("outlines.backends.outlines_core", "OutlinesCoreLogitsProcessor", lambda processor, num_rows, *_:
     [OutlinesIndex(processor.index)] * num_rows if processor.is_first_token else None),
)
