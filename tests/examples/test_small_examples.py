"""The examples that people copy: what they print is true, and a batch that was stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path

from module_files import load_module

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_batch_of_lines_that_was_stopped_goes_on(tmp_path):
    example, answers = load_module(EXAMPLES / "batch_jsonl.py"), tmp_path / "answers.jsonl"
    given = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text().splitlines()]
    given.append({"id": "long", "prompt": [5] * 5000})
    given.append({"id": "short", "prompt": given[0]["prompt"], "settings": {"max_new_tokens": 1}})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in given))
    assert example.main([str(prompts), str(answers)]) == len(given)
    whole = {line["id"]: line for line in example.lines_of(answers)}
    assert whole.keys() == {line["id"] for line in given}
    assert "4821" in whole[0]["text"] and whole[0]["error"] is None
    assert whole["long"]["finish_reason"] == "error" and "5000" in whole["long"]["error"]
    assert len(whole["short"]["token_ids"]) == 1
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:2]) + lines[2][:10])  # as an interrupt leaves it
    assert example.main([str(prompts), str(answers)]) == len(given) - 2
    assert {line["id"]: line for line in example.lines_of(answers)} == whole
    assert example.main([str(prompts), str(answers)]) == 0


def test_the_evaluation_finds_what_the_model_was_trained_for(capsys):
    assert load_module(EXAMPLES / "evaluate.py").main() == (1.0, 1.0)
    assert "exact match 100%, multiple choice 100%" in capsys.readouterr().out


def test_branches_compute_only_what_is_new():
    example = load_module(EXAMPLES / "agent_tree.py")
    nodes = example.main()
    assert [sum(node.level == level for node in nodes) for level in (1, 2, 3)] == [2, 4, 8]
    by_level = {level: [node for node in nodes if node.level == level] for level in (1, 2, 3)}
    assert all(node.cached > 0.5 * node.prompt for node in by_level[2] + by_level[3])
    assert any("4821" in node.messages[2]["content"] for node in by_level[1])
