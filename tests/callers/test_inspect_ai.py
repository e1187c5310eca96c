"""inspect-ai's `hf` provider: batches from a thread of its own, always with `return_dict_in_generate=True`."""

from __future__ import annotations

import asyncio

import pytest
from programs import assert_program

import hf_paged

inspect_ai = pytest.importorskip("inspect_ai", reason="of the extra `callers`")
dataset = pytest.importorskip("inspect_ai.dataset")
scorer = pytest.importorskip("inspect_ai.scorer")
solver = pytest.importorskip("inspect_ai.solver")
inspect_model = pytest.importorskip("inspect_ai.model")

QUESTION = "What is 47 + 8?"


@pytest.fixture
def llm(talker_path):
    llm = inspect_model.get_model(f"hf/{talker_path}", memoize=False, do_sample=False)
    yield llm
    hf_paged.disable(llm.api.model)


def _ask(llm, *questions, **config):
    """The answers to questions asked at once, of which inspect-ai makes one batch."""
    async def ask():
        options = inspect_model.GenerateConfig(max_tokens=160, **config)
        return await asyncio.gather(*(llm.generate(question, config=options) for question in questions))

    return asyncio.run(ask())


def test_questions_asked_at_once(llm):
    def program():
        return [answer.completion for answer in _ask(llm, QUESTION, "bold-fox", "amber")]

    assert len(set(assert_program(llm.api.model, program, ["native"]))) == 3


def test_stop_sequences(llm):
    """They become transformers' own criterion, given as an object."""
    [answer] = _ask(llm, QUESTION)
    stop = answer.completion[-40:]
    text = assert_program(llm.api.model, lambda: _ask(llm, QUESTION, stop_seqs=[stop])[0].completion, ["native"])
    assert answer.completion.startswith(text) and text.endswith(stop)


def test_log_probs(llm):
    """They are read off the logits of every step, which lockstep keeps."""
    def program():
        [answer] = _ask(llm, QUESTION, logprobs=True, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        return [(one.token, round(one.logprob, 3), [top.token for top in one.top_logprobs]) for one in content]

    assert len(assert_program(llm.api.model, program, ["lockstep"])) == 160


def test_an_evaluation(llm, tmp_path):
    def program():
        questions = [dataset.Sample(input=text, target="55") for text in (QUESTION, "bold-fox", "amber")]
        task = inspect_ai.Task(dataset=questions, solver=solver.generate(), scorer=scorer.match())
        [log] = inspect_ai.eval(task, model=llm, max_tokens=160, display="none", log_dir=str(tmp_path))
        assert log.status == "success", log.error
        return [sample.output.completion for sample in log.samples]

    assert_program(llm.api.model, program, ["native"])
