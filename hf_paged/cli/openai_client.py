"""One streamed request to a server of the OpenAI API, timed. Python's own HTTP client is all that it needs."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """One request's times in seconds.

    Attributes:
        started: when it was sent, as `time.perf_counter` counts.
        seconds: until the end of the answer.
        first: until its first text; None: there was none.
        gaps: between two pieces of text.
        num_prompt_tokens, num_tokens: as the server counts; where it does not, pieces are counted for tokens.
        error: None, or what went wrong.
    """

    started: float
    seconds: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.seconds - self.first) / (self.num_tokens - 1)


class Client:
    """Requests to one server; each has a connection of its own, so that any number may be under way."""

    def __init__(self, url: str, api_key: str, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r}: expected an address as http://127.0.0.1:8000/v1")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path, self._timeout = parts.path.rstrip("/"), timeout
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}

    def first_model(self) -> str:
        """What the server lists first.

        Raises:
            OSError, RuntimeError: nobody answers there, or with something else.
        """
        connection = self._connect()
        try:
            connection.request("GET", f"{self._path}/models", headers=self._headers)
            reply = connection.getresponse()
            said = reply.read().decode()
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{self._path}/models answers {reply.status}: {said:.200}; give --model")
        models = json.loads(said).get("data") or []
        if not models:
            raise RuntimeError("the server lists no model; give --model")
        return str(models[0]["id"])

    def ask(self, body: dict[str, Any]) -> Answer:
        """Send a request, which says whether it is a chat, and read its answer to the end; never raises for it."""
        endpoint = "chat/completions" if "messages" in body else "completions"
        answer = Answer(time.perf_counter())
        connection = self._connect()
        try:
            connection.request("POST", f"{self._path}/{endpoint}", json.dumps(body).encode(), self._headers)
            reply = connection.getresponse()
            if reply.status != 200:
                answer.error = f"status {reply.status}: {reply.read().decode(errors='replace'):.200}"
            else:
                _read(answer, _events(reply))
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        answer.seconds = time.perf_counter() - answer.started
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of every server-sent event; not every server ends with the one that OpenAI's does."""
    for line in reply:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _read(answer: Answer, events: Iterator[dict[str, Any]]) -> None:
    pieces, last, counted, is_whole = 0, answer.started, None, False
    for event in events:
        if "error" in event:
            answer.error = f"{event['error']}"[:200]
            return
        counted = event.get("usage") or counted
        choices = event.get("choices") or ()
        is_whole |= any(choice.get("finish_reason") for choice in choices)
        if any(map(_text, choices)):
            now = time.perf_counter()
            pieces += 1
            if answer.first is None:
                answer.first = now - answer.started
            else:
                answer.gaps.append(now - last)
            last = now
    answer.num_tokens = pieces if counted is None else counted["completion_tokens"]
    answer.error = None if is_whole else "the stream ended before the answer did"
    answer.num_prompt_tokens = 0 if counted is None else counted["prompt_tokens"]


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
