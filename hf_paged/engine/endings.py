"""How the text of a request ends: what ended it, and whether that is part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_paged.engine.detokenizer import TextStream
from hf_paged.engine.stop_texts import StopTexts, cut


@dataclass(frozen=True)
class Ending:
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

    def stream(self, tokenizer: Any) -> TextStream | CutText:
        """Decodes the tokens as they come."""
        text = TextStream(tokenizer, skip_special_tokens=self.skips_special)
        return text if self.keeps_stop or not self.stop_strings else CutText(text, self.stop_strings)

    def reason(self, finish_reason: str, token_ids: list[int], tokenizer: Any) -> tuple[str, str | int | None]:
        """The finish reason as a caller sees it, and what ended the request."""
        if finish_reason == "eos" and token_ids and token_ids[-1] in self.stop_token_ids:
            return "stop", token_ids[-1]
        if finish_reason != "stop":
            return finish_reason, None
        if len(self.stop_strings) < 2 or tokenizer is None:
            return finish_reason, self.stop_strings[0] if len(self.stop_strings) == 1 else None
        return finish_reason, first_stop(tokenizer.decode(token_ids, skip_special_tokens=False), self.stop_strings)

    def text(self, finish_reason: str, token_ids: list[int], tokenizer: Any) -> str:
        """The whole text of a request that ended so, by the scheduler's word for it."""
        cuts = not self.keeps_stop
        if cuts and finish_reason == "eos":
            token_ids = token_ids[:-1]
        text: str = tokenizer.decode(token_ids, skip_special_tokens=self.skips_special)
        return cut(text, self.stop_strings)[0] if cuts and finish_reason == "stop" else text


PLAIN_ENDING = Ending()


def first_stop(text: str, strings: Sequence[str]) -> str | None:
    """The one whose last character comes first; of several that end there, the longest."""
    found = [(at + len(stop), -len(stop), stop) for stop in strings if (at := text.find(stop)) >= 0]
    return min(found)[2] if found else None


class CutText:
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
