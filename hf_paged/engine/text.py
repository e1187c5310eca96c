"""The text of a request: decoded incrementally or as a whole, with or without the stop string that ended it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class TextStream:
    """An incremental decoder of tokens. Its pieces concatenate to the text of all tokens, up to the first stop string.

    A piece is held back while it ends inside a character or may be the beginning of a stop string. Fast tokenizers
    decode with tokenizers' `DecodeStream`; with others, all tokens are decoded each time.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, stop_strings: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._skip, self._stop_strings = tokenizer, skip_special_tokens, stop_strings
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.restart([])

    def restart(self, token_ids: Sequence[int]) -> None:
        """Restart behind `token_ids`, whose text was returned before."""
        self._stream = None
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []
        self._num_decoded = 0  # characters
        self._text = ""
        self._watch = StopTexts(self._stop_strings)
        self.push(list(token_ids))

    def push(self, token_ids: list[int]) -> str:
        """Append `token_ids`, and return the text that is certain now."""
        if self._stream is not None:
            piece = "".join(self._stream.step(self._backend, token) or "" for token in token_ids)
        else:
            self._ids += token_ids
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
            piece = "" if whole.endswith("�") else whole[self._num_decoded :]
            self._num_decoded += len(piece)
        if self._stop_strings:
            piece = self._watch.push(piece)
        self._text += piece
        return piece

    def finish(self, text: str) -> str:
        """Return the rest of the whole `text` that was not returned yet."""
        return text[len(self._text) :] if text.startswith(self._text) else ""


class StopTexts:
    """A filter that cuts a growing text at the first of some stop texts.

    Args:
        texts: the stop texts, none of them empty.
        keeps: keep the stop text as the end of the text.

    Attributes:
        is_met: a stop text was found; no text follows.
        met: the stop text whose last character came first, of several that end there the longest; or None.
    """

    def __init__(self, texts: tuple[str, ...], keeps: bool = False) -> None:
        self._texts = texts
        self._keeps = keeps
        self._held = ""  # text that may be the beginning of a stop text
        self.is_met = False
        self.met: str | None = None

    def push(self, piece: str) -> str:
        """Append `piece`, and return the text that is certain now."""
        if self.is_met or not piece:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            self.is_met, self._held = True, ""
            end, start, self.met = min(found)  # by its end, so that the cut into pieces makes no difference
            return text[: end if self._keeps else start]
        start = len(text) - max((self._overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """Return the text that was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of `text` that `stop` begins with."""
        most = min(len(text), len(stop) - 1)
        return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)


def cut(text: str, texts: tuple[str, ...], keeps: bool = False) -> tuple[str, bool]:
    """Return a text up to its first stop text, and whether there was one."""
    watch = StopTexts(texts, keeps)
    return watch.push(text) + watch.finish(), watch.is_met


@dataclass(frozen=True)
class StopPolicy:
    """The text settings of a request. The defaults give the text of `model.generate` with a tokenizer.

    Attributes:
        stop_strings: the strings that end the request.
        stop_token_ids: the tokens that end the request and are no EOS tokens.
        keeps_stop: the text contains the stop string or token that ended the request.
        skips_special: the text contains no special tokens.
    """

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = True
    skips_special: bool = True

    def stream(self, tokenizer: Any) -> TextStream:
        return TextStream(tokenizer, skip_special_tokens=self.skips_special,
                          stop_strings=() if self.keeps_stop else self.stop_strings)

    def reason(self, finish_reason: str, token_ids: list[int], tokenizer: Any) -> tuple[str, str | int | None]:
        """Return the public finish reason, and the stop string or token that ended the request, or None."""
        if finish_reason == "eos" and token_ids and token_ids[-1] in self.stop_token_ids:
            return "stop", token_ids[-1]
        may_stop = finish_reason == "length" and not self.keeps_stop  # the last token may complete a stop string
        if finish_reason != "stop" and not (may_stop and self.stop_strings and tokenizer is not None):
            return finish_reason, None
        if not may_stop and (len(self.stop_strings) < 2 or tokenizer is None):
            return finish_reason, self.stop_strings[0] if len(self.stop_strings) == 1 else None
        watch = StopTexts(self.stop_strings)
        watch.push(tokenizer.decode(token_ids, skip_special_tokens=False))
        return finish_reason if watch.met is None else "stop", watch.met

    def text(self, finish_reason: str, token_ids: list[int], tokenizer: Any) -> str:
        """Return the whole text of a request that ended with the scheduler's ``finish_reason``."""
        cuts = not self.keeps_stop
        if cuts and finish_reason == "eos":
            token_ids = token_ids[:-1]
        text: str = tokenizer.decode(token_ids, skip_special_tokens=self.skips_special)
        return cut(text, self.stop_strings)[0] if cuts and finish_reason in ("stop", "length") else text


PLAIN_ENDING = StopPolicy()


def tokenizer_traits(tokenizer: Any) -> tuple:
    """Return the state of a tokenizer on which stop strings depend, also if it is changed in place."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else len(tokenizer.get_vocab())
    return id(tokenizer), size, id(backend), None if decoder is None else decoder.__getstate__()
