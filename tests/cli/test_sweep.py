"""The sweep of rates against a server: what it sends, what it measures, what it says of answers that fail."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest
from fake_openai import fake_server

from hf_paged.cli import main
from hf_paged.cli.openai_client import Answer, Client
from hf_paged.cli.sweep import read_prompts, send, summary


def swept(server, tmp_path, *arguments):
    """Exit status and report of a sweep."""
    path = tmp_path / "report.json"
    status = main(["bench", "server", server.url, "--prompt-tokens", "5", "--output-tokens", "4", "--num-prompts", "6",
                   "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_a_sweep_measures_every_rate_and_marks_the_best(tmp_path, capsys):
    with fake_server(pieces=4, pause=0.02) as server:
        status, report = swept(server, tmp_path, "--rates", "20,inf", "--ignore-eos", "--api-key", "secret")
    assert status == 0 and report["model"] == "a-model"
    assert [point["rate"] for point in report["points"]] == [20.0, None]
    slow, fast = report["points"]
    for point in (slow, fast):
        assert (point["num_done"], point["num_failed"]) == (6, 0)
        assert (point["num_prompt_tokens"], point["num_output_tokens"]) == (6 * 7, 6 * 4)
        assert 0.02 <= point["first"]["p50"] < 0.1 and 0.08 <= point["total"]["p50"] < 0.4
        assert point["per_token"]["p50"] == pytest.approx((point["total"]["p50"] - point["first"]["p50"]) / 3, rel=0.5)
        assert point["output_tokens_per_second"] == pytest.approx(24 / point["seconds"])
    assert slow["seconds"] > fast["seconds"] and fast["is_pareto"]
    assert len(server.bodies) == 1 + 6 + 6 and server.keys == {"Bearer secret"}
    for path, body in server.bodies:
        assert path == "/v1/completions" and len(body["prompt"].split()) == 5
        assert body["max_tokens"] == 4 and body["stream"] and body["ignore_eos"] and body["model"] == "a-model"
    assert len({body["prompt"] for _, body in server.bodies}) == 13  # no answer comes from a cache of prompts
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_chats_and_prompts_of_a_file(tmp_path):
    lines = [{"prompt": "one", "temperature": 0.5}, {"messages": [{"role": "user", "content": "two"}]}]
    given = tmp_path / "prompts.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    with fake_server(pause=0) as server:
        swept(server, tmp_path, "--rates", "inf", "--prompts", str(given), "--model", "b")
        _first, *rest = server.bodies
        assert sorted(path for path, _ in rest) == ["/v1/chat/completions"] * 3 + ["/v1/completions"] * 3
        assert {body.get("temperature") for path, body in rest if path == "/v1/completions"} == {0.5}
        server.bodies.clear()
        swept(server, tmp_path, "--rates", "inf", "--chat")
    assert {path for path, _ in server.bodies} == {"/v1/chat/completions"}
    assert {body["messages"][0]["role"] for _, body in server.bodies} == {"user"}


@pytest.mark.parametrize(("settings", "error"), [
    ({"status": 503}, "status 503: out of order"), ({"breaks_after": 2}, "the stream ended before the answer did"),
])
def test_answers_that_fail_are_counted_and_named(tmp_path, capsys, settings, error):
    with fake_server(pause=0, **settings) as server:
        status, report = swept(server, tmp_path, "--rates", "inf")
    assert status == 1
    [point] = report["points"]
    assert (point["num_done"], point["num_failed"], point["num_output_tokens"]) == (0, 6, 0)
    assert set(point["errors"]) == {error} and point["first"] == {} == point["total"]
    assert capsys.readouterr().out.count(error) == 1


def test_pieces_stand_for_tokens_where_the_server_does_not_count():
    with fake_server(pieces=5, pause=0, counts=False) as server:
        answer = Client(server.url, "none", 10).ask({"prompt": "x"})
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.error) == (5, 0, None)


def test_at_most_so_many_requests_are_under_way():
    """Counted where they are asked for: a server may see the next one come before it has left the last one."""
    under_way, seen, lock = [], [], threading.Lock()

    class Counting(Client):
        def ask(self, body):
            with lock:
                under_way.append(body)
                seen.append(len(under_way))
            try:
                return super().ask(body)
            finally:
                with lock:
                    under_way.remove(body)

    with fake_server(pause=0.02) as server:
        answers = send([{"prompt": "x"}] * 8, float("inf"), Counting(server.url, "none", 10), 3, random.Random(0))
        assert max(seen) == 3 and len(answers) == 8
        started = time.perf_counter()
        send([{"prompt": "x"}] * 20, 100.0, Client(server.url, "none", 10), 20, random.Random(0))
    assert 0.1 < time.perf_counter() - started < 5.0  # 20 arrivals at 100 a second


def test_a_server_that_nobody_runs_or_without_models(tmp_path, capsys):
    with fake_server(models=()) as server:
        assert main(["bench", "server", server.url]) == 2
        assert capsys.readouterr().err == "hf-paged: the server lists no model; give --model\n"
    assert main(["bench", "server", server.url]) == 2
    assert "refused" in capsys.readouterr().err
    assert main(["bench", "server", "127.0.0.1:8000"]) == 2
    assert "expected an address as http://" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['["x"]', '{"text": "x"}', ""])
def test_a_line_that_is_no_prompt_is_named(tmp_path, text):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + text + "\n" if text else "\n")
    with pytest.raises(ValueError, match=r"line 2: expected an object|expected a line"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_summary_of_answers_with_one_token_has_no_time_per_token():
    found = summary(2.0, [Answer(0.0, 1.5, 1.5, num_tokens=1), Answer(0.0, error="x")], 2.0)
    assert found["per_token"] == {} and found["total"]["p99"] == 1.5 and found["requests_per_second"] == 0.5


def test_the_picture_of_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    with fake_server(pause=0) as server:
        path = tmp_path / "sweep.svg"
        swept(server, tmp_path, "--rates", "50,inf", "--plot", str(path))
    drawn = path.read_text()
    assert drawn.startswith("<?xml") and "<svg" in drawn and len(drawn) > 10_000
