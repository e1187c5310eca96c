"""Text of a growing sequence, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
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
