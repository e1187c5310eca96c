"""The script that docs/from_vllm.md ports runs as it stands there, and each of its fields does what the page says."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import PagedConfig, PagedGenerator
from hf_paged.vllm_names import LOADING, METHODS, SAMPLING

PAGE = (Path(__file__).parents[1] / "docs" / "from_vllm.md").read_text()
THEIRS, OURS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `")]
OURS_OF_CALLS = {*inspect.signature(PagedGenerator.generate).parameters, *vars(GenerationConfig()), "tools",
                 "chat_template", "add_generation_prompt", "continue_final_message"}
OURS_OF_LOADING = {*inspect.signature(PagedGenerator.from_pretrained).parameters, "revision",
                   *(field.name for field in dataclasses.fields(PagedConfig))}


def names_of(*titles):
    """The names in the first columns of the tables under these titles: code spans, up to their values."""
    sections = [PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in titles]
    assert all(sections)
    cells = [line.split("|")[1] for section in sections for line in section.splitlines() if line.startswith("| `")]
    return {re.split(r"[=({]", span)[0] for cell in cells for span in re.findall(r"`(\w[^`]*)`", cell)}


@pytest.fixture(scope="module")
def script(trained_path):
    """The names of the script after it ran, with the generator still open."""
    source = OURS.replace('"Qwen/Qwen3-8B"', f'"{trained_path}", dtype="float32"').replace("llm.close()\n", "")
    assert trained_path in source and "close" not in source
    names: dict = {}
    exec(compile(source, "docs/from_vllm.md", "exec"), names)
    yield names
    names["llm"].close()


@pytest.fixture(scope="module")
def made(script):
    return script["completions"]


def without(script, *names, **changes):
    """The completions of the script's call with these fields left out or changed."""
    params = {name: value for name, value in script["params"].items() if name not in names} | changes
    return script["llm"].generate(script["prompts"], priority=[1, 0], **params)


def keywords_of(source, function):
    """The names that a script gives to a function."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    [call] = [call for call in calls if getattr(call.func, "id", None) == function]
    return [keyword.arg for keyword in call.keywords]


def test_every_field_of_the_script_is_in_the_table():
    ours = {word for _, here in ROWS for word in re.findall(r"\w+", here)}
    theirs = {word for them, here in ROWS for word in re.findall(r"\w+", them)}
    same = {word for them, here in ROWS if "the same" in here for word in re.findall(r"\w+", them)}
    assert set(keywords_of(THEIRS, "SamplingParams")) <= theirs
    assert set(keywords_of(OURS, "dict")) - {"timeout"} <= ours | same


def test_every_field_of_vllm_is_in_the_table():
    """Those of vLLM 0.11, and `best_of` and `logits_processors` of those before."""
    fields = [
        "n", "best_of", "structured_outputs", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
        "min_tokens", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens",
        "spaces_between_special_tokens", "logits_processors", "include_stop_str_in_output",
        "truncate_prompt_tokens", "output_kind", "bad_words", "logit_bias", "allowed_token_ids", "extra_args",
    ]
    assert set(fields) <= {word for them, _ in ROWS for word in re.findall(r"\w+", them)}


@pytest.mark.parametrize(("titles", "table", "ours"), [
    (("Fields of SamplingParams", "Arguments of LLM.generate"), SAMPLING, OURS_OF_CALLS),
    (("Arguments of LLM",), LOADING, OURS_OF_LOADING),
    (("Methods of LLM",), METHODS, {"generate"}),
])
def test_the_tables_are_those_that_errors_answer_from(titles, table, ours):
    """A name of vLLM is one of ours, too, or an error says what to write in its place; the page has both."""
    listed = names_of(*titles)
    assert listed - ours == {*table}, listed ^ {*table}


def test_the_flags_on_our_side_exist():
    from hf_paged.serve import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    section = PAGE.partition("\n## Flags of vllm serve\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    same = {flag for row in rows if row[2].strip() == "the same" for flag in re.findall(r"--[\w-]+", row[1])}
    ours = {flag for row in rows for flag in re.findall(r"--[\w-]+", row[2])} | same
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {"--num-blocks", "--host", "--max-model-len", "--enforce-eager", "--served-model-name"} <= ours <= known
    fields = {field.name for field in dataclasses.fields(PagedConfig)}
    none = next(row[1] for row in rows if "no such flag" in row[2])
    assert not {flag[2:].replace("-", "_") for flag in re.findall(r"--[\w-]+", none)} & fields


def test_n_and_best_of(script, made):
    every = without(script, "best_of", num_return_sequences=4)
    assert (len(made), len(every)) == (4, 8)
    for prompt in range(2):
        ranked = sorted(every[4 * prompt : 4 * prompt + 4], key=lambda one: -one.cumulative_logprob)
        assert [one.token_ids for one in made[2 * prompt : 2 * prompt + 2]] == [one.token_ids for one in ranked[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
                                  "top_k", "min_p", "sequence_bias", "seed"])
def test_what_changes_the_draws(script, made, name):
    changes = {"top_p": {"top_p": 0.3}, "top_k": {"top_k": 2}, "min_p": {"min_p": 0.5}, "seed": {"seed": 8}}
    others = without(script, name, **changes.get(name, {}))
    assert [one.token_ids for one in others] != [one.token_ids for one in made]


def test_greedy_in_place_of_a_temperature(script):
    drawn = ("temperature", "best_of", "num_return_sequences", "top_p", "top_k", "min_p", "seed")
    one, other = (without(script, *drawn, do_sample=False, seed=seed) for seed in (1, 2))
    assert [each.token_ids for each in one] == [each.token_ids for each in other]


def test_seeds_repeat(script, made):
    assert [one.token_ids for one in without(script)] == [one.token_ids for one in made]


def test_stop_strings_and_tokens(script, made):
    """Whatever ends a request is told, and no part of the text; the default keeps it."""
    stops = script["params"]["stop_token_ids"]
    found = {one.stop_reason for one in without(script, seed=3, num_return_sequences=4)}
    assert found & set(stops)
    letters = ["e", "a"]
    for one in without(script, stop_strings=letters):
        if one.finish_reason == "stop" and one.stop_reason in letters:
            assert not any(letter in one.text for letter in letters)
        elif one.finish_reason == "stop":
            assert one.token_ids[-1] == one.stop_reason == stops[0]
            assert one.text == script["tokenizer"].decode(one.token_ids[:-1])
    kept = without(script, "include_stop_str_in_output", stop_strings=letters)
    assert all(one.text == script["tokenizer"].decode(one.token_ids) for one in kept)
    assert {one.stop_reason for one in kept} & set(letters)


def test_words_and_tokens_that_may_not_come(script):
    params = script["params"]
    forced = {(ids[0],): 30.0 for ids in [*params["bad_words_ids"], params["suppress_tokens"]]}
    barred = {token for ids in [*params["bad_words_ids"], params["suppress_tokens"]] if len(ids) == 1 for token in ids}
    free = without(script, "bad_words_ids", "suppress_tokens", sequence_bias=forced)
    assert any(barred & set(one.token_ids) for one in free)
    assert not any(barred & set(one.token_ids) for one in without(script, sequence_bias=forced))


def test_lengths_and_the_end(script):
    eos = script["llm"].model.generation_config.eos_token_id
    likes_the_end = {(eos,): 30.0}
    for one in without(script, sequence_bias=likes_the_end, presence_penalty=0.0, frequency_penalty=0.0):
        assert one.token_ids.count(eos) > 1 and one.finish_reason == "length" and len(one.token_ids) == 24
        assert script["tokenizer"].decode([eos]) in one.text  # skip_special_tokens=False
    for one in without(script, "eos_token_id", "skip_special_tokens", sequence_bias=likes_the_end):
        assert (one.finish_reason, len(one.token_ids), one.stop_reason) == ("eos", 7, None)
        assert script["tokenizer"].decode([eos]) not in one.text
    stop = script["params"]["stop_token_ids"][0]
    for one in without(script, sequence_bias={(stop,): 30.0}):
        assert (one.finish_reason, len(one.token_ids), one.stop_reason) == ("stop", 7, stop)


def test_log_probabilities_of_both_kinds(script, made):
    model = script["llm"].model
    for one in made:
        ids = torch.tensor([one.prompt_token_ids + one.token_ids])
        with torch.no_grad():
            known = model(input_ids=ids).logits[0].double().log_softmax(-1)
        start = len(one.prompt_token_ids) - 1
        assert one.logprobs_kind == "raw" and len(one.top_logprobs) == len(one.token_ids) == len(one.logprobs)
        for i, (token, top) in enumerate(zip(one.token_ids, one.top_logprobs, strict=True)):
            assert 5 <= len(top) <= 6 and token in top
            assert list(top.values())[:5] == pytest.approx(known[start + i].topk(5).values.tolist(), abs=1e-3)
        assert one.cumulative_logprob == pytest.approx(sum(known[start + i, token].item() for i, token in
                                                           enumerate(one.token_ids)), abs=1e-2)
        for i, top in enumerate(one.prompt_top_logprobs[1:]):
            assert list(top.values())[:3] == pytest.approx(known[i].topk(3).values.tolist(), abs=1e-3)
    processed = without(script, "top_logprobs", logprobs=5)
    assert processed[0].logprobs_kind == "processed"
    assert processed[0].top_logprobs != made[0].top_logprobs


@pytest.mark.parametrize(("form", "pattern"), [
    ({"regex": "[0-9]{3}"}, "[0-9]{3}"), ({"choice": ["yes", "no"]}, "yes|no"), ({"grammar": 'root ::= "a" "b"'}, "ab"),
    ({"json_schema": {"type": "boolean"}}, "true|false"),
])
def test_structured_outputs(script, form, pattern):
    pytest.importorskip("xgrammar", reason="of the extra `structured`")
    for one in script["llm"].generate(script["prompts"], structured=form, max_new_tokens=24, do_sample=False):
        assert re.fullmatch(pattern, one.text.strip())


def test_times_and_order(script, made):
    assert all(None not in one.timings for one in made)
    assert {one.finish_reason for one in without(script, timeout=1e-6)} == {"timeout"}
    with PagedGenerator.from_pretrained(script["llm"].model.name_or_path, max_num_seqs=1) as one_by_one:
        first, second = one_by_one.generate(script["prompts"], max_new_tokens=2, priority=[1, 0])
    assert second.timings.started < first.timings.started
