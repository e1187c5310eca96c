"""Which keywords of a call are for the template of its chats, and which are generation settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase

from hf_paged.config import OF_LOADING, PagedConfig
from hf_paged.options.prompts import is_chat, is_without_template
from hf_paged.options.request_options import RequestOptions
from hf_paged.vllm_names import SAMPLING, unknown_names

# Arguments of `PagedGenerator.generate` that are about a call, besides `RequestOptions`.
OF_CALL = ("adapter_names", "best_of", "cache_salt", "chat_template_kwargs", "generation_config", "on_error",
           "priority", "prompts", "request_ids", "seed", "structured")

# Parameters of `apply_chat_template` that decide what it returns: here always the token ids of one chat, as a list.
OURS = ("tokenize", "return_dict", "return_tensors", "padding", "return_assistant_tokens_mask")
_RENDERED = ("conversation", "messages")  # the chat itself


def split_keywords(keywords: dict[str, Any], explicit: Any, prompts: list[Any], tokenizer: Any,
                   configs: Collection[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of ``tokenizer.apply_chat_template``, and the generation settings.

    A field of a `GenerationConfig` is a setting. Of the others, parameters of `apply_chat_template` and variables that
    the chat template refers to are the template's.

    Args:
        keywords: of the call.
        explicit: its ``chat_template_kwargs``, which are the template's whatever their names, and win.
        prompts: each in its own form.
        configs: the call's and the model's `GenerationConfig`, whose own entries are settings, too.

    Raises:
        TypeError: `explicit` is no dict.
        ValueError: a keyword that is neither; one of the template and no chat among the prompts, or one that decides
            in what form ids come.
    """
    if explicit is not None and not isinstance(explicit, Mapping):
        raise TypeError(f"chat_template_kwargs={explicit!r:.80}: expected a dict of keywords of apply_chat_template")
    template = dict(explicit or {})
    fields = set(vars(GenerationConfig())).union(*(vars(c) for c in configs if isinstance(c, GenerationConfig)))
    rest = {name: value for name, value in keywords.items() if name not in fields}
    known = template_parameters(tokenizer) if rest else frozenset()
    found = {name: value for name, value in rest.items() if name in known}
    if len(found) < len(rest):
        variables = template_variables(tokenizer, {**found, **template})
        found = {name: value for name, value in rest.items() if name in known or name in variables}
    template = {**found, **template}
    if unknown := {name: value for name, value in rest.items()
                   if name not in found and not hasattr(GenerationConfig, name)}:
        raise ValueError(_unknown_settings(unknown, {*fields, *known}))
    settings = {name: value for name, value in keywords.items() if name not in found}
    if not template:
        return {"add_generation_prompt": True}, settings
    if wrong := sorted({*OURS, *_RENDERED} & set(template)):
        raise ValueError(f"{wrong[0]}={template[wrong[0]]!r:.80}: expected it left out; a chat's prompt is always its "
                         "token ids as a list")
    if not any(map(is_chat, prompts)) and any(map(is_without_template, prompts)):
        raise ValueError(f"{', '.join(sorted(template))}: for the template of chats, and no prompt is a chat (a list "
                         "of messages, each a dict with a role); leave it out, or give chats")
    template.setdefault("add_generation_prompt", not template.get("continue_final_message"))
    return template, settings


def _unknown_settings(given: dict[str, Any], accepted: set[str]) -> str:
    parameters = {name for name in inspect.signature(GenerationMixin.generate).parameters if name != "self"}
    fields = {field.name for field in dataclasses.fields(PagedConfig)}
    elsewhere = {
        "PagedGenerator.from_pretrained, PagedGenerator or hf_paged.enable": fields,
        "PagedGenerator.from_pretrained": OF_LOADING, "PagedGenerator.generate": ("use_tqdm",),
        "model.generate, which the enabled model runs": parameters - {"kwargs"},
    }
    return unknown_names(given, {*accepted, *RequestOptions._fields, *OF_CALL}, SAMPLING, elsewhere,
                         "expected fields of a GenerationConfig, parameters of apply_chat_template or variables of "
                         "the chat template")


def template_parameters(tokenizer: Any) -> frozenset[str]:
    """Names that `apply_chat_template` takes, in transformers and of this tokenizer."""
    methods = (PreTrainedTokenizerBase.apply_chat_template, getattr(tokenizer, "apply_chat_template", None))
    parameters = [p for method in methods if method is not None for p in inspect.signature(method).parameters.values()]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in named and p.name not in ("self", *_RENDERED))


def template_variables(tokenizer: Any, template: dict[str, Any]) -> frozenset[str]:
    """Variables that the chat template refers to and does not set itself; none where there is no template to read."""
    if not hasattr(tokenizer, "get_chat_template"):
        return frozenset()
    try:
        return _variables_of(tokenizer.get_chat_template(template.get("chat_template"), template.get("tools")))
    except Exception:  # no template, or one that is none: applying it says so
        return frozenset()


@functools.lru_cache(maxsize=32)
def _variables_of(source: str) -> frozenset[str]:
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(source))) - {*_RENDERED}
