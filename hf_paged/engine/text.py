"""The text of a request: decoded as it grows or as a whole, what ended it, and whether that is part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class TextStream:
    """Decodes tokens as they come. The pieces join up to the decoded whole.

    A piece is held back while it ends inside a character. tokenizers' `DecodeStream` does the work where the
    tokenizer is a fast one; others are decoded as a whole each time.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.restart([])

    def restart(self, token_ids: Sequence[int]) -> None:
        """Start anew behind `token_ids`, which were pushed before."""
        self._stream = None
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []
        self._text = ""
        self.push(list(token_ids))

    def push(self, token_ids: list[int]) -> str:
        """The text that `token_ids` add, as far as it is certain."""
        if self._stream is not None:
            piece = "".join(self._stream.step(self._backend, token) or "" for token in token_ids)
        else:
            self._ids += token_ids
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
            piece = "" if whole.endswith("�") else whole[len(self._text) :]
        self._text += piece
        return piece

    def finish(self, text: str) -> str:
        """What is still missing of the whole `text`."""
        return text[len(self._text) :] if text.startswith(self._text) else ""


class StopTexts:
    """The text of one answer as it grows, up to the first of its stop texts.

    Args:
        texts: none of them empty.
        keeps: the stop text that ended the answer is part of it.

    Attributes:
        is_met: one of them came; nothing of the answer follows any more.
        met: the one whose last character came first; of several that end there, the longest. None: none came.
    """

    def __init__(self, texts: tuple[str, ...], keeps: bool = False) -> None:
        self._texts = texts
        self._keeps = keeps
        self._held = ""  # its beginning may be that of a stop text
        self.is_met = False
        self.met: str | None = None

    def push(self, piece: str) -> str:
        """What may be sent now that `piece` came."""
        if self.is_met or not piece:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            self.is_met, self._held = True, ""
            end, start, self.met = min(found)  # what came first, however the text is cut into pieces
            return text[: end if self._keeps else start]
        start = len(text) - max((self._overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        most = min(len(text), len(stop) - 1)
        return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)


def cut(text: str, texts: tuple[str, ...], keeps: bool = False) -> tuple[str, bool]:
    """A whole answer up to its first stop text, and whether there was one."""
    watch = StopTexts(texts, keeps)
    return watch.push(text) + watch.finish(), watch.is_met


class StopStringBuffer:
    """A `TextStream` up to the first of some stop texts: what may be the beginning of one is held back."""

    def __init__(self, stream: TextStream, stop_strings: tuple[str, ...]) -> None:
        self._stream = stream
        self._stop_strings = stop_strings
        self._begin()

    def _begin(self) -> None:
        self._watch = StopTexts(self._stop_strings)
        self._text = ""

    def restart(self, token_ids: Sequence[int]) -> None:
        """Start anew behind `token_ids`, which were pushed before."""
        self._begin()
        self._stream.restart([])
        self.push(list(token_ids))

    def push(self, token_ids: list[int]) -> str:
        """The text that `token_ids` add, as far as it is certain."""
        piece = self._watch.push(self._stream.push(token_ids))
        self._text += piece
        return piece

    def finish(self, text: str) -> str:
        """What is still missing of the whole `text`."""
        return text[len(self._text) :] if text.startswith(self._text) else ""


@dataclass(frozen=True)
class StopPolicy:
    """What a request says of its text; the defaults are what `model.generate` with a tokenizer would show.

    Attributes:
        stop_strings: end the request.
        stop_token_ids: likewise, those that are no EOS.
        keeps_stop: what ended it is part of its text.
        skips_special: special tokens are no part of it.
    """

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keeps_stop: bool = True
    skips_special: bool = True

    def stream(self, tokenizer: Any) -> TextStream | StopStringBuffer:
        """Decodes the tokens as they come."""
        text = TextStream(tokenizer, skip_special_tokens=self.skips_special)
        return text if self.keeps_stop or not self.stop_strings else StopStringBuffer(text, self.stop_strings)

    def reason(self, finish_reason: str, token_ids: list[int], tokenizer: Any) -> tuple[str, str | int | None]:
        """The finish reason as a caller sees it, and what ended the request."""
        if finish_reason == "eos" and token_ids and token_ids[-1] in self.stop_token_ids:
            return "stop", token_ids[-1]
        if finish_reason != "stop":
            return finish_reason, None
        if len(self.stop_strings) < 2 or tokenizer is None:
            return finish_reason, self.stop_strings[0] if len(self.stop_strings) == 1 else None
        watch = StopTexts(self.stop_strings)
        watch.push(tokenizer.decode(token_ids, skip_special_tokens=False))
        return finish_reason, watch.met

    def text(self, finish_reason: str, token_ids: list[int], tokenizer: Any) -> str:
        """The whole text of a request that ended so, by the scheduler's word for it."""
        cuts = not self.keeps_stop
        if cuts and finish_reason == "eos":
            token_ids = token_ids[:-1]
        text: str = tokenizer.decode(token_ids, skip_special_tokens=self.skips_special)
        return cut(text, self.stop_strings)[0] if cuts and finish_reason == "stop" else text


PLAIN_ENDING = StopPolicy()
