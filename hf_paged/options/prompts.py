"""Prompts of all accepted forms, chats among them: conversion into token ids, and earlier outputs that they bring."""

from __future__ import annotations

import html
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hf_paged.options.arguments import token_ids
from hf_paged.options.processors import Prompt, chat_for, reads_images, render, tokenizer_in
from hf_paged.outputs import Completion, VersionRun, last_of

ACCEPTED = (
    "a str, token ids, a chat (a list of messages with a role), {'prompt': str} or {'prompt_token_ids': token ids}, a "
    "Completion to go on from, or a list of such prompts"
)
_TEXT, _IDS = "prompt", "prompt_token_ids"
OUTPUT = "output_token_ids"
_ROLES = ("system", "developer", "user", "assistant")  # whose contents are text; a tool's may be data
_OTHERS = "other roles"
_TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio", "file")
_IMAGES = ("image", "image_url")  # types of the parts that processors read as images
_EXPECTED = "expected text parts, {'type': 'text', 'text': str}"
_WITH_IMAGES = (f"{_EXPECTED}, and images, {{'type': 'image', 'image': image, path or URL}} or {{'type': 'image_url', "
                "'image_url': {'url': 'data:image/...'}}")


def prompt_list(prompts: Any) -> list[Any]:
    """Return a list of the single prompts, each still in its own form; raises TypeError for anything else."""
    if isinstance(prompts, (str, dict, Completion)) or is_chat(prompts) or _is_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts={prompts!r:.80}: expected {ACCEPTED}, got {type(prompts).__name__}")
    return list(prompts)


def read_prompt(prompt: Any, tokenizer: Any, template: dict[str, Any]) -> Prompt:
    """Return one prompt as token ids, whose values are checked by the engine, and as what is made of its images.

    Args:
        prompt: of one of the forms that `ACCEPTED` names.
        tokenizer: needed for text and chats; a processor for images.
        template: keywords of ``tokenizer.apply_chat_template`` for a chat.

    Raises:
        TypeError: another form; the message says what was found and what is accepted.
        ValueError: text or a chat without a tokenizer.
        Exception: whatever a chat template raises about a chat.
    """
    if isinstance(prompt, dict):
        prompt = _inside(prompt)
    if isinstance(prompt, str):
        prompt = tokenizer_in(_require(tokenizer, "text prompts"))(prompt)["input_ids"]
    elif is_chat(prompt):
        tokenizer = _require(tokenizer, "chats")
        return render(tokenizer, readable_chat(prompt, tokenizer, template), template)
    elif isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    elif not isinstance(prompt, (list, tuple)):
        raise TypeError(f"{prompt!r:.80}: expected {ACCEPTED}, got {type(prompt).__name__}")
    return Prompt(prompt)


def prompt_ids(prompt: Any, tokenizer: Any, template: dict[str, Any]) -> list[int]:
    """Return the token ids of `read_prompt`."""
    return read_prompt(prompt, tokenizer, template).ids


def is_without_template(prompt: Any) -> bool:
    """Return whether a value is a prompt to which no chat template is applied; False if it is no prompt."""
    if isinstance(prompt, dict):
        return not is_message(prompt)
    return isinstance(prompt, (str, np.ndarray, Completion)) or (_is_token_ids(prompt) and not is_chat(prompt))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError for the name of a tokenizer, which other libraries take in place of the object."""
    if isinstance(tokenizer, (str, os.PathLike)):
        raise TypeError(f"tokenizer={tokenizer!r:.200}: expected None, a tokenizer or a processor, such as "
                        f"AutoTokenizer.from_pretrained({tokenizer!r:.200})")


def _inside(prompt: dict[str, Any]) -> Any:
    """What a dict around one prompt holds, as vLLM takes them: ids where there are both; None counts as left out."""
    if is_message(prompt):
        raise TypeError(f"{prompt!r:.80}: this is one message; expected a chat, which is a list of messages")
    given = {name for name, value in prompt.items() if value is not None}
    if not given or not given <= {_TEXT, _IDS}:
        raise TypeError(f"a dict with {sorted(map(str, given))}: expected {_TEXT!r} (a str) or {_IDS!r} (token ids), "
                        "and all else as arguments of the call")
    inside, kinds = (prompt[_IDS], (list, tuple, np.ndarray)) if _IDS in given else (prompt[_TEXT], (str,))
    if not isinstance(inside, kinds) or is_chat(inside):
        name = _IDS if _IDS in given else _TEXT
        raise TypeError(f"{name}={inside!r:.80} in a dict: expected {'token ids' if name == _IDS else 'a str'}, got "
                        f"{type(inside).__name__}")
    return inside


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(t, (int, np.integer)) for t in value)


def _require(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"tokenizer=None: {what} need a tokenizer; give one, or pass token ids")
    return tokenizer


def check_output(previous: Completion, vocab_size: int, max_new_tokens: int, logprobs_kind: str | None) -> Completion:
    """Return an earlier output with checked token ids; a ValueError or TypeError says why it cannot be continued."""
    ids = token_ids(previous.token_ids, vocab_size, OUTPUT) if len(previous.token_ids) else []
    if len(ids) > max_new_tokens:
        raise ValueError(f"{OUTPUT} of {len(ids)} tokens: expected at most {max_new_tokens}, the max_new_tokens, "
                         "which count from the prompt")
    if None not in (logprobs_kind, previous.logprobs_kind) and logprobs_kind != previous.logprobs_kind:
        raise ValueError(f"logprobs={logprobs_kind!r}: expected {previous.logprobs_kind!r}, as the completion has them")
    return replace(previous, token_ids=ids)


def known_logprobs(previous: Completion) -> list[float | None]:
    """Return one entry per token; all are None if `logprobs` has another length."""
    known, count = previous.logprobs, len(previous.token_ids)
    return list(known) if known is not None and len(known) == count else [None] * count


def known_top_logprobs(previous: Completion) -> list[dict[int, float] | None]:
    """Return one dict per token; all are None if `top_logprobs` has another length. Ids may be str, as in JSON."""
    tops, count = previous.top_logprobs, len(previous.token_ids)
    if tops is None or len(tops) != count:
        return [None] * count
    return [None if top is None else {int(token): known for token, known in top.items()} for top in tops]


def known_versions(previous: Completion) -> list[VersionRun]:
    """Return version runs of all tokens, with the version None if it is unknown."""
    count = len(previous.token_ids)
    if sum(run.num_tokens for run in previous.version_runs) == count:
        return list(previous.version_runs)
    return list(last_of([VersionRun(None, count)], count))


def split_output(prompt: Any) -> tuple[Any, Completion | None]:
    """Return a prompt in one of the forms of `prompt_ids`, and its earlier output without the prompt, or None.

    Raises TypeError if the output or the versions are no sequence, and ValueError for a completion of images.
    """
    if isinstance(prompt, Completion):
        if prompt.has_images:
            raise ValueError("a Completion of a prompt with images, which its token ids do not hold: expected its "
                             "chat, with the text so far as the last message and continue_final_message=True")
        runs = tuple(VersionRun(*run) for run in prompt.version_runs)
        return prompt.prompt_token_ids, Completion(
            prompt.token_ids, None, prompt.finish_reason, [], prompt.logprobs, version_runs=runs, seed=prompt.seed,
            logprobs_kind=prompt.logprobs_kind, top_logprobs=prompt.top_logprobs)
    if isinstance(prompt, dict) and prompt.get(OUTPUT) is not None:
        output = prompt[OUTPUT]
        if isinstance(output, (str, bytes)) or not hasattr(output, "__len__"):
            raise TypeError(f"{OUTPUT}={output!r:.80}: expected token ids, got {type(output).__name__}")
        return {name: value for name, value in prompt.items() if name != OUTPUT}, Completion(output, None, "abort", [])
    return prompt, None


def is_chat(value: Any) -> bool:
    """Return whether a value is meant as one chat: a list of dicts with at least one message and no other prompt."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, dict) for one in value):
        return False
    return any(map(is_message, value)) and not any(name in one for one in value for name in (_TEXT, _IDS))


def is_message(value: Any) -> bool:
    """Return whether a value is meant as a message of a chat."""
    return isinstance(value, dict) and ("role" in value or "content" in value)


def readable_chat(chat: Any, tokenizer: Any, keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a chat with contents in the form that its template reads.

    Parts stay as they are given wherever the template renders them and does not write down the list itself. Where it
    raises or does, text parts are joined by spaces, as transformers' server joins them, in as few roles as suffice.

    Args:
        chat: as `is_chat` knows it.
        keywords: of `apply_chat_template`.

    Raises:
        ValueError, TypeError: a message without a role, or a part that is no text; names the message.
    """
    for number, message in enumerate(chat):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}]={message!r:.80}: expected a role, as in "
                             "{'role': 'user', 'content': 'text'}")
    if _has_images(chat, reads_images(tokenizer)):
        return list(chat)
    given = {_group(message) for message in chat if _parts(message) is not None}
    if not given:
        return list(chat)
    groups = [group for group in (*_ROLES, _OTHERS) if group in given]
    fault: Exception | None = None
    wrong: Exception | None = None
    for joined in itertools.chain.from_iterable(itertools.combinations(groups, n) for n in range(len(groups) + 1)):
        try:
            found = [_joined(message, f"messages[{number}]['content']") if _group(message) in joined else message
                     for number, message in enumerate(chat)]
        except (ValueError, TypeError) as error:
            wrong = wrong or error
            continue
        try:
            _check_rendered(found, tokenizer, keywords)
            return found
        except Exception as error:
            fault = fault or error
    if wrong is not None:
        raise type(wrong)(f"{wrong}; with the parts as given, the chat template fails: {fault}") from fault
    return found  # with all joined: applying the template says what is wrong


def _has_images(chat: Sequence[Mapping[str, Any]], are_read: bool) -> bool:
    """Return whether parts of a chat are images; raises ValueError for media that are not read, which a template may
    drop, or write as placeholders."""
    found = False
    for number, message in enumerate(chat):
        for place, part in enumerate(_parts(message) or () if message["role"] in _ROLES else ()):
            media = [word for word in MEDIA if word == part.get("type") or part.get(word) is not None] if isinstance(
                part, Mapping) else []
            if are_read and media and part.get("type") in _IMAGES and {*media} <= {*_IMAGES}:
                found = True
            elif media:
                raise ValueError(f"messages[{number}]['content'][{place}]: a part of type {media[0]!r}, " + (
                    _WITH_IMAGES if are_read else f"{_EXPECTED}: images need an image-text model and its processor as "
                                                  "tokenizer, AutoProcessor.from_pretrained(...)"))
    return found


def _group(message: Mapping[str, Any]) -> str:
    role: str = message["role"]
    return role if role in _ROLES else _OTHERS


def _parts(message: Mapping[str, Any]) -> list[Any] | None:
    content = message.get("content")
    return list(content) if isinstance(content, (list, tuple)) else None


def _check_rendered(chat: list[dict[str, Any]], tokenizer: Any, keywords: Mapping[str, Any]) -> None:
    """Raise what a template raises about a chat, and ValueError where it writes a list of parts, not their texts."""
    rendered = _rendered(chat, tokenizer, keywords)
    for number, message in enumerate(chat):
        parts = _parts(message) if message["role"] in _ROLES else None
        if parts is None or not (written := {form for form in _forms(parts) if form in rendered}):
            continue
        # The template's own words, and other messages, may hold the same characters.
        try:
            without = _rendered([*chat[:number], {**message, "content": ""}, *chat[number + 1:]], tokenizer, keywords)
        except Exception:
            without = ""
        if any(rendered.count(form) > without.count(form) for form in written):
            raise ValueError(f"it writes the list that messages[{number}]['content'] is")


def _rendered(chat: list[dict[str, Any]], tokenizer: Any, keywords: Mapping[str, Any]) -> str:
    return _plain(tokenizer.apply_chat_template(chat_for(tokenizer, chat), **keywords, tokenize=False))


def _forms(parts: list[Any]) -> set[str]:
    """Return texts that a template may write for a list in place of text: Python's repr or JSON, keys sorted or not."""
    made = {_plain(repr(parts))}
    for is_sorted, is_ascii in itertools.product((False, True), repeat=2):
        try:
            text = json.dumps(parts, sort_keys=is_sorted, ensure_ascii=is_ascii)
            made |= {_plain(text), _plain(repr(json.loads(text)))}
        except (TypeError, ValueError):  # no JSON
            continue
    return made


def _plain(text: str) -> str:
    """Return a text without the characters that filters of a template change: case, spaces, quotes and escapes."""
    return re.sub(r"[\s\"'\\]", "", html.unescape(text)).casefold()


def _joined(message: dict[str, Any], name: str) -> dict[str, Any]:
    parts = _parts(message)
    if parts is None:
        return message
    return {**message, "content": " ".join(_text(part, f"{name}[{number}]") for number, part in enumerate(parts))}


def _text(part: Any, name: str) -> str:
    if not isinstance(part, dict):
        raise TypeError(f"{name}={part!r:.80}: {_EXPECTED}")
    if part.get("type") not in _TEXT_PARTS:
        raise ValueError(f"{name}: a part of type {part.get('type')!r:.80}, {_EXPECTED}")
    if not isinstance(part.get("text"), str):
        raise TypeError(f"{name}={part!r:.80}: {_EXPECTED}")
    return str(part["text"])
