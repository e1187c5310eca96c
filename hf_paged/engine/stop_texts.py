"""Texts that end an answer: what of a text may be sent before it is known how it goes on, and where it is cut."""

from __future__ import annotations


class StopTexts:
    """The text of one answer as it grows, up to the first of its stop texts.

    Args:
        texts: none of them empty.
        keeps: the stop text that ended the answer is part of it.

    Attributes:
        is_met: one of them came; nothing of the answer follows any more.
    """

    def __init__(self, texts: tuple[str, ...], keeps: bool = False) -> None:
        self._texts = texts
        self._keeps = keeps
        self._held = ""  # its beginning may be that of a stop text
        self.is_met = False

    def push(self, piece: str) -> str:
        """What may be sent now that `piece` came."""
        if self.is_met or not piece:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            self.is_met, self._held = True, ""
            end, start = min(found)  # what came first, however the text is cut into pieces
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
