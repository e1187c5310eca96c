"""Separation of a call's keywords into arguments of the chat template and generation settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin

from hf_paged.config import OF_LOADING, PagedConfig
from hf_paged.options.keywords import CallKeywords, names_of
from hf_paged.options.processors import own_template, tokenizer_in
from hf_paged.options.prompts import is_chat, is_without_template
from hf_paged.vllm_names import SAMPLING, unknown_names

# Parameters of `apply_chat_template` that decide the type of its result, which must be one chat's token ids as a list.
OURS = ("tokenize", "return_dict", "return_tensors", "padding", "return_assistant_tokens_mask")
# Parameters that only the template reads.
_FOR_TEMPLATE = ("tools", "documents", "add_generation_prompt")
# Keywords that are dropped if None, since a template may treat a variable that is None as set.
_LEFT_OUT_AS_NONE = ("tools", "documents", "enable_thinking")
RENDERED = ("conversation", "messages")  # the chat itself


def split_keywords(keywords: dict[str, Any], explicit: Any, prompts: list[Any], tokenizer: Any,
                   configs: Collection[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of ``tokenizer.apply_chat_template``, and the generation settings.

    A field of a `GenerationConfig` is a setting. Other keywords go to the template if they are parameters of
    `apply_chat_template` or variables of the template. ``tools``, ``documents`` and ``enable_thinking`` are ignored if
    None.

    Args:
        keywords: the keywords of the call.
        explicit: the call's ``chat_template_kwargs``, which all go to the template, and override `keywords`.
        prompts: the prompts, in any form.
        configs: the call's and the model's `GenerationConfig`, whose own entries are settings, too.

    Raises:
        TypeError: `explicit` is no dict.
        ValueError: a keyword is neither; or it is for the template, but no prompt is a chat, the template does not read
            it, or it decides the type of the ids.
    """
    if explicit is not None and not isinstance(explicit, Mapping):
        raise TypeError(f"chat_template_kwargs={explicit!r:.80}: expected a dict of keywords of apply_chat_template")
    template = dict(explicit or {})
    keywords = {name: value for name, value in keywords.items() if value is not None or name not in _LEFT_OUT_AS_NONE}
    fields = set(vars(GenerationConfig())).union(*(vars(c) for c in configs if isinstance(c, GenerationConfig)))
    rest = {name: value for name, value in keywords.items() if name not in fields}
    known = template_parameters(tokenizer) if rest else frozenset()
    found = {name: value for name, value in rest.items() if name in known}
    read: frozenset[str] = frozenset()
    if len(found) < len(rest) and (source := template_source(tokenizer, {**found, **template})) is not None:
        read = variables_of(source)
        found = {name: value for name, value in rest.items() if name in known or name in read}
    template = {**found, **template}
    if unknown := {name: value for name, value in rest.items()
                   if name not in found and not hasattr(GenerationConfig, name)}:
        parameters = {name for name in inspect.signature(GenerationMixin.generate).parameters if name != "self"}
        elsewhere = {
            "PagedGenerator.from_pretrained, PagedGenerator or hf_paged.enable":
            {field.name for field in dataclasses.fields(PagedConfig)},
            "PagedGenerator.from_pretrained": OF_LOADING, "PagedGenerator.generate": ("use_tqdm",),
            "model.generate, which the enabled model runs": parameters - {"kwargs"},
        }
        accepted = {*fields, *known, *read, "prompts", "generation_config", *names_of(CallKeywords)}
        raise ValueError(unknown_names(
            unknown, accepted, SAMPLING, elsewhere,
            "expected fields of a GenerationConfig, parameters of apply_chat_template or variables of the chat "
            f"template, which refers to {_listed(read)}"))
    settings = {name: value for name, value in keywords.items() if name not in found}
    if not template:
        return {"add_generation_prompt": True}, settings
    if wrong := sorted({*OURS, *RENDERED} & set(template)):
        raise ValueError(f"{wrong[0]}={template[wrong[0]]!r:.80}: expected it left out; a chat's prompt is always its "
                         "token ids as a list")
    if not any(map(is_chat, prompts)) and any(map(is_without_template, prompts)):
        raise ValueError(f"{', '.join(sorted(template))}: for the template of chats, and no prompt is a chat (a list "
                         "of messages, each a dict with a role); leave it out, or give chats")
    check_read(template, tokenizer)
    template.setdefault("add_generation_prompt", not template.get("continue_final_message"))
    return template, settings


def _listed(read: frozenset[str]) -> str:
    return ", ".join(sorted(read)) or "none"


def template_parameters(tokenizer: Any) -> frozenset[str]:
    """Return the parameters of `apply_chat_template`, of transformers and of this tokenizer's own."""
    methods = (PreTrainedTokenizerBase.apply_chat_template, getattr(tokenizer, "apply_chat_template", None))
    return frozenset().union(*(_named(method) for method in methods if method is not None)) - {"self", *RENDERED}


def _named(method: Any) -> frozenset[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in inspect.signature(method).parameters.values() if p.kind in kinds)


def check_read(given: Mapping[str, Any], tokenizer: Any, *, others: Mapping[str, Any] | None = None,
               parameters: Collection[str] | None = None) -> None:
    """Raise ValueError for a keyword that neither `apply_chat_template` nor the template reads.

    Args:
        given: keywords of `apply_chat_template`.
        others: further keywords, on which the choice of the template may depend.
        parameters: the parameters of `apply_chat_template` that are accepted; None for all.
    """
    source = template_source(tokenizer, {**(others or {}), **given})
    if source is None:
        return
    read = variables_of(source)
    own = {*(template_parameters(tokenizer) if parameters is None else parameters)} - {*_FOR_TEMPLATE}
    method = type(tokenizer).apply_chat_template
    if method not in (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template):
        # A tokenizer's own method may read them itself.
        own |= _named(method) & {*_FOR_TEMPLATE}
    neutral = {"tools": not given.get("tools"), "documents": not given.get("documents"),
               "add_generation_prompt": given.get("add_generation_prompt") is (not given.get("continue_final_message"))}
    for name, value in given.items():
        if value is not None and name not in read and name not in own and not neutral.get(name, False):
            raise ValueError(f"{name}={value!r:.80}: expected it left out, since the model's chat template does not "
                             f"refer to it (it refers to {_listed(read)})")


def template_source(tokenizer: Any, keywords: Mapping[str, Any]) -> str | None:
    """Return the template that `apply_chat_template` renders with these keywords; None if there is none to read."""
    named, is_processor = keywords.get("chat_template"), tokenizer_in(tokenizer) is not tokenizer
    if not is_processor and not hasattr(tokenizer, "get_chat_template"):
        return None
    try:
        source = own_template(tokenizer, named) if is_processor else tokenizer.get_chat_template(
            named, keywords.get("tools"))
        variables_of(source)
    except Exception:  # no template, or one that is none: applying it says so
        return None
    return str(source)


@functools.lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template refers to and does not set itself, except the chat's."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(source))) - {*RENDERED}
