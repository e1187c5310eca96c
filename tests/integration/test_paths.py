"""`stats().calls`: how many calls took which path for which reason, and the new tokens that they returned."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from pathlib import Path

import pytest
import torch
from support import (
    RecordingStreamer,
    batch,
    byte_tokenizer,
    num_calls,
    random_prompts,
    run_out,
    stock_generate,
    tiny_model,
)
from threads import run_threads
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.engine.loop import EngineCore
from hf_paged.integration.paths import new_tokens
from hf_paged.outputs import PATHS

pytestmark = pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
INPUTS = batch([20, 13, 5])
# What leads a call to each path, by the kind of reason that is counted.
WAYS = {
    "native": (None, {}),
    "lockstep": ("num_beams=… is not carried out by the paged engine", {"num_beams": 2}),
    "stock": ("prefill_chunk_size=… is not carried out by the paged engine", {"prefill_chunk_size": 4}),
}


def calls_of(model):
    return hf_paged.get_engine(model).stats().calls


class Raising(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise KeyError("a processor of the caller's")


@pytest.mark.parametrize("path", WAYS)
def test_calls_and_tokens_of_each_path(path):
    model = hf_paged.enable(tiny_model())
    assert calls_of(model) == dict.fromkeys(PATHS, hf_paged.CallStats(0, 0, {}))
    kind, options = WAYS[path]
    for count in (1, 2):
        model.generate(**INPUTS, **options, max_new_tokens=6)
        reasons = {} if kind is None else {kind: hf_paged.CallStats(count, 18 * count, {})}
        assert calls_of(model) == dict.fromkeys(PATHS, hf_paged.CallStats(0, 0, {})) | {
            path: hf_paged.CallStats(count, 18 * count, reasons)
        }


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("pad", [0, None])
def test_tokens_after_the_end_of_a_row_do_not_count(path, pad):
    """The padding is a token that the model also makes, or the EOS itself."""
    model = tiny_model()
    free = model.generate(**INPUTS, max_new_tokens=8)[:, 20:]
    eos = int(free[0, 2])
    lengths = [row.tolist().index(eos) + 1 if eos in row else 8 for row in free]
    options = {"eos_token_id": eos, "pad_token_id": eos if pad is None else int(free[1, -1])}
    if path == "lockstep":
        options |= {"return_dict_in_generate": True, "output_scores": True}
    elif path == "stock":
        options |= {"prefill_chunk_size": 4}
    hf_paged.enable(model).generate(**INPUTS, **options, max_new_tokens=8)
    assert min(lengths) < max(lengths)
    assert (calls_of(model)[path].num_calls, calls_of(model)[path].num_tokens) == (1, sum(lengths))


def test_rows_that_a_criterion_ends_without_an_eos():
    """Such a row is padded to the others' length where there is an EOS that may come."""

    class EndsFirstRow(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([row == 0 and input_ids.shape[1] >= 23 for row in range(len(input_ids))])

    model = hf_paged.enable(tiny_model())
    output = model.generate(**INPUTS, max_new_tokens=8, eos_token_id=255, pad_token_id=0,
                            stopping_criteria=[EndsFirstRow()])
    assert (output[0, 23:] == 0).all() and not (output[:, 20:] == 255).any()
    assert calls_of(model)["lockstep"].num_tokens == 3 + 8 + 8


def test_of_beams_those_that_are_returned_count():
    model = hf_paged.enable(tiny_model())
    model.generate(**INPUTS, num_beams=4, num_return_sequences=2, max_new_tokens=5)
    assert calls_of(model)["lockstep"].num_tokens == 3 * 2 * 5


def test_embeddings_in_place_of_ids():
    model = hf_paged.enable(tiny_model())
    model.generate(inputs_embeds=torch.ones(2, 5, 64), max_new_tokens=4)
    assert calls_of(model)["stock"].num_tokens == 8


def test_drafts_that_stock_makes_are_no_calls():
    model = hf_paged.enable(tiny_model())
    model.generate(**batch([20]), assistant_model=model, max_new_tokens=6)
    assert num_calls(model) == {"stock": 1}
    assert calls_of(model)["stock"].num_tokens == 6


@pytest.mark.parametrize("shown", ["kwargs", "args"])
def test_a_custom_generate_function(shown):
    model = hf_paged.enable(tiny_model())

    def three_more(model, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids[:, :3]], dim=1)

    ids = INPUTS["input_ids"]
    args = (ids,) if shown == "args" else ()
    model.generate(*args, **({} if args else {"input_ids": ids}), custom_generate=three_more)
    assert (num_calls(model), calls_of(model)["stock"].num_tokens) == ({"stock": 1}, 9)


def test_a_custom_generate_of_a_folder(tmp_path, monkeypatch):
    """Named by the caller, and as transformers fetches decoding methods that it moved to the Hub."""
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "import torch\n\n\ndef generate(model, input_ids, **kwargs):\n"
        "    return torch.cat([input_ids, input_ids[:, :2]], dim=1)\n"
    )
    model = hf_paged.enable(tiny_model())
    asked = {**INPUTS, "custom_generate": str(tmp_path), "trust_remote_code": True}
    explained = hf_paged.explain(model, **asked)
    assert model.generate(**asked).shape == (3, 22)
    assert (explained.path, num_calls(model), calls_of(model)["stock"].num_tokens) == ("stock", {"stock": 1}, 6)
    monkeypatch.setitem(GENERATION_MODES_MAPPING, GenerationMode.DOLA_GENERATION, str(tmp_path))
    assert model.generate(**INPUTS, dola_layers="low", trust_remote_code=True).shape == (3, 22)
    assert (num_calls(model), calls_of(model)["stock"].num_tokens) == ({"stock": 2}, 12)


@pytest.mark.parametrize("path", WAYS)
def test_a_call_that_raises_counts_with_no_tokens(path):
    model = hf_paged.enable(tiny_model())
    options = {"logits_processor": LogitsProcessorList([Raising()])} | WAYS[path][1]
    if path == "native":  # where the only code of the caller's is the streamer's
        streamer = RecordingStreamer()
        streamer.put = lambda value: value.numel() == 1 and 1 // 0
        options = {"streamer": streamer}
    with pytest.raises((KeyError, ZeroDivisionError)):
        model.generate(**batch([20]), **options, max_new_tokens=4)
    assert (num_calls(model), calls_of(model)[path].num_tokens) == ({path: 1}, 0)


def test_a_call_that_raises_before_it_decodes_took_no_path():
    model = hf_paged.enable(tiny_model(), strict=True)
    with pytest.raises(ValueError, match="no_such_option"):
        model.generate(**INPUTS, no_such_option=3)
    with pytest.raises(hf_paged.FallbackError, match="Leave the option out"):
        model.generate(**INPUTS, prefill_chunk_size=4)
    assert num_calls(model) == {}


def test_a_call_that_turns_to_stock_half_way_is_stocks():
    model = tiny_model()
    inputs = batch([6, 4])
    free = stock_generate(model, **inputs, max_new_tokens=6)
    with torch.no_grad():  # the token that row 0 makes third poisons what follows
        model.model.embed_tokens.weight[free[0, 8]] = float("nan")
    hf_paged.enable(model).generate(**inputs, max_new_tokens=6)
    assert num_calls(model) == {"stock": 1}
    assert list(calls_of(model)["stock"].by_reason) == ["row … failed: …"]


def test_calls_of_several_threads():
    model = hf_paged.enable(tiny_model())
    options = [WAYS[path][1] for path in WAYS] * 4

    def work(index):
        for _ in range(3):
            model.generate(**batch([7, 4]), **options[index], max_new_tokens=3)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(options))]
    run_threads(threads)
    assert {path: (stats.num_calls, stats.num_tokens) for path, stats in calls_of(model).items()} == dict.fromkeys(
        PATHS, (12, 12 * 6)
    )


@pytest.mark.parametrize(("options", "path"), [({}, "native"), ({"num_beams": 2}, "stock")])
def test_generate_batch(options, path):
    model = hf_paged.enable(tiny_model())
    small = ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=64, use_cuda_graph=False)
    model.generate_batch(random_prompts([5, 9]), GenerationConfig(max_new_tokens=4, **options), small, warmup=False)
    assert (num_calls(model), calls_of(model)[path].num_tokens) == ({path: 1}, 8)


# -- calls of a `PagedGenerator` ------------------------------------------

PROMPTS = random_prompts([5, 9])


async def _astream(generator, options):
    return [output async for output in generator.astream(PROMPTS, **options)]


# Everything of a `PagedGenerator` that takes prompts.
ENTRIES = {
    "generate": lambda generator, options: generator.generate(PROMPTS, **options),
    "stream": lambda generator, options: list(generator.stream(PROMPTS, **options)),
    "agenerate": lambda generator, options: asyncio.run(generator.agenerate(PROMPTS, **options)),
    "astream": lambda generator, options: asyncio.run(_astream(generator, options)),
}
# What opens a session of an engine, and how its calls are counted.
SESSIONS = {
    "generator.py": "each of ENTRIES", "integration/async_calls.py": "each of ENTRIES",
    "integration/generate.py": "a call of an enabled model", "integration/continuous_batching/board.py":
    "the requests of a manager: `generate_batch` counts itself",
}


def test_entries_are_all_there_are():
    takes_prompts = {name for name, function in inspect.getmembers(PagedGenerator, inspect.isfunction)
                     if not name.startswith("_") and "prompts" in inspect.signature(function).parameters}
    assert takes_prompts == {*ENTRIES, "warm_up"}  # whose examples are calls of `generate`
    root = Path(hf_paged.__file__).parent
    opens = {path.relative_to(root).as_posix() for path in root.rglob("*.py")
             if re.search(r"\.session\(|\(OutputSink\):", path.read_text())}
    assert opens == {*SESSIONS, "engine/engine.py"}  # for the examples of `warm_up`


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_counts_as_one_call_with_the_tokens_that_it_returned(entry):
    with PagedGenerator(tiny_model()) as generator:
        engine = generator.engine
        for count in (1, 2):
            ENTRIES[entry](generator, {"max_new_tokens": 6})
            assert (engine.stats().calls["native"], num_calls(generator.model)) == (
                hf_paged.CallStats(count, 12 * count, {}), {"native": count})
        with pytest.raises(ValueError, match="temperature"):
            ENTRIES[entry](generator, {"max_new_tokens": 6, "do_sample": True, "temperature": -1.0})
        assert engine.stats().calls["native"].num_calls == 2  # no call that came to decode


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_raises_counts_with_what_it_had_handed_out(entry, monkeypatch):
    own, steps = EngineCore.step, []

    def failing(self, **options):
        steps.append(1)
        if len(steps) == 4:
            raise MemoryError
        return own(self, **options)

    monkeypatch.setattr(EngineCore, "step", failing)
    with PagedGenerator(tiny_model()) as generator:
        with pytest.raises(MemoryError):
            ENTRIES[entry](generator, {"max_new_tokens": 6})
        found = generator.engine.stats().calls["native"]
        assert found.num_calls == 1 and bool(found.num_tokens) == ("stream" in entry)


@pytest.mark.parametrize("entry", ["generate", "agenerate"])
def test_of_best_of_those_that_are_returned_count(entry):
    with PagedGenerator(tiny_model()) as generator:
        ENTRIES[entry](generator, {"max_new_tokens": 6, "best_of": 3, "do_sample": True, "seed": 1})
        assert generator.engine.stats().num_generated_tokens == 36
        assert generator.engine.stats().calls["native"] == hf_paged.CallStats(1, 12, {})


def test_output_that_a_prompt_brings_and_prompts_that_cannot_run_are_no_tokens_of_a_call():
    with PagedGenerator(tiny_model()) as generator:
        prompts = [{"prompt_token_ids": PROMPTS[0], "output_token_ids": [5, 6]}, PROMPTS[1], []]
        made = generator.generate(prompts, max_new_tokens=6, on_error="complete")
        assert [len(one.token_ids) for one in made] == [6, 6, 0]
        assert generator.engine.stats().calls["native"] == hf_paged.CallStats(1, 10, {})


def test_tensors_are_one_call_of_the_model():
    with PagedGenerator(tiny_model()) as generator:
        generator.generate(**INPUTS, max_new_tokens=4)
        generator.generate(**INPUTS, max_new_tokens=4, num_beams=2)
        assert num_calls(generator.model) == {"native": 1, "lockstep": 1}


def test_requests_that_are_stepped_by_hand_belong_to_no_call():
    with PagedGenerator(tiny_model()) as generator:
        generator.engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=4))
        run_out(generator.engine)
        stats = generator.engine.stats()
        assert num_calls(generator.model) == {} and stats.num_generated_tokens == 4


@pytest.mark.timeout(60)
def test_a_stream_that_is_collected_while_a_call_is_counted_is_counted():
    """Garbage collection may end an abandoned stream anywhere, in the same thread."""
    with PagedGenerator(tiny_model()) as generator:
        stream = generator.stream(PROMPTS, max_new_tokens=6)
        next(stream)
        counts = generator.engine.calls
        with counts._lock.rlock:
            del stream
        assert counts.stats()["native"] == hf_paged.CallStats(1, 1, {})


def test_what_is_no_sequence_has_no_tokens():
    config = tiny_model().generation_config
    assert new_tokens("text", 3, (), config) == new_tokens(None, 3, (), config) == 0


def test_stop_strings_natively():
    """What the row got counts, whatever follows it in the tensor."""
    model = hf_paged.enable(tiny_model())
    tokenizer = byte_tokenizer()
    free = model.generate(**batch([20]), max_new_tokens=8)[0, 20:].tolist()
    texts = [tokenizer.decode([token]) for token in free]
    index, text = next((i, text) for i, text in enumerate(texts) if text.isascii() and text.isprintable())
    before = calls_of(model)["native"].num_tokens
    model.generate(**batch([20]), max_new_tokens=8, stop_strings=text, tokenizer=tokenizer)
    assert calls_of(model)["native"].num_tokens - before == index + 1
