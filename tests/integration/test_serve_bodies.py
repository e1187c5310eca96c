"""Malformed and odd bodies over HTTP: what transformers' server carries out is carried out, the rest is explained."""

from __future__ import annotations

import logging

import pytest
from serve_bodies import CHAT, ENDPOINTS, bodies, encoded
from serve_support import Server, served

MORE = ('{"stop": []}',)  # what the batching manager carries out although `model.generate` refuses it


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """The stock server logs a traceback for each of its errors."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def carried_out(trained_path, _quiet):
    """Whether transformers' own server, without hf_paged and by `model.generate`, answers each body with 200."""
    server = Server(trained_path, continuous_batching=False)
    try:
        return {(name, path): server.post(path, body)[0] == 200 for name, path, body in bodies()}
    finally:
        server.close()


@pytest.fixture(scope="module", params=[False, True], ids=["generate", "continuous"])
def server(request, trained_path, carried_out):
    with served(trained_path, request.param) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_a_body_is_carried_out_or_explained(server, carried_out, stream):
    """200 where stock's server says 200; else 400 or 422 with the reason, as the OpenAI API words errors. A body that
    is refused leaves nothing behind: the server is healthy, and answers the next."""
    wrong = []
    for name, path, body in bodies(stream):
        status, said = server.post(path, body)
        if status == 200:
            as_expected = (carried_out[name, path] or name in MORE) and not (stream and '"error": ' in said)
        else:
            reason = said["error"] if isinstance(said, dict) else {}
            explained = reason.get("type") == "invalid_request_error" and len(reason["message"]) > 3
            as_expected = status in (400, 422) and explained and not carried_out[name, path]
        if not as_expected:
            wrong.append((name, path, status, said))
    assert not wrong
    assert sum(carried_out.values()) > 15
    assert server.health() == 200
    for path in ENDPOINTS:
        assert server.post(path, encoded(path, {}, stream))[0] == 200
    assert server.settles()


def test_the_reason_names_what_is_wrong(server):
    for fields, words in (({"messages": [{}]}, ("messages", "role")),
                          ({"max_tokens": "x"}, ("generation settings", "'x'")),
                          ({"generation_config": "[]"}, ("generation_config", "JSON object")),
                          ({"model": "other"}, ("pinned", "other")), ({"tools": 5}, ("tools",)),
                          ({"generation_config": '{"do_sample": true, "top_k": -1}'}, ("top_k",)),
                          ({"stop": [5]}, ("generation settings",))):  # fmt: skip
        status, said = server.post(CHAT, encoded(CHAT, fields))
        assert (fields, status) == (fields, 400)
        assert all(word in said["error"]["message"] for word in words), said
        assert said["detail"] == said["error"]["message"]
