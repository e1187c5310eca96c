"""Tiny models, prompts and the one comparison that most tests make: enabled generate against stock generate."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

import hf_paged
from hf_paged.outputs import StepOutput

VOCAB = 256
TRAINED_MODEL = "examples/models/tiny-qwen3"
# Some of the words that the trained model knows.
ADJECTIVES = ("amber", "bold", "calm", "deep", "fast", "gold", "happy", "jade", "kind", "lucky", "mint", "noble")
ANIMALS = ("ant", "bear", "cat", "crab", "dove", "eagle", "fox", "goose", "hare", "lion", "newt", "otter", "owl")


def tiny_config(**overrides: Any) -> Qwen3Config:
    """Two layers, GQA 2; weights wide enough that greedy choices have margins far above rounding."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen3Config(**(settings | overrides))


def tiny_model(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """A random model in eval mode on the CPU, always the same for one seed and config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config(**overrides)).eval()
        with torch.no_grad():  # biases and norm weights start as constants: a bug in how they are used would not show
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(0.0, 0.2)
                elif "norm" in name:
                    parameter.uniform_(0.6, 1.4)
    return model


def random_prompts(lengths: list[int], seed: int = 1, vocab_size: int = VOCAB) -> list[list[int]]:
    """Token ids in [1, vocab_size): 0 is the pad token, which stock would mask."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def left_padded(prompts: list[list[int]], pad: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Prompts as `generate` takes them: input_ids and attention_mask, both int64 [rows, longest]."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def batch(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    return left_padded(random_prompts(lengths, seed))


class HostMemory:
    """Lays tensors side by side on a CPU, as `AdjacentMemory` does on a GPU, but for storages that can be resized.

    torch.from_dlpack gives each tensor a storage of its own over its part of one piece of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if not like:
            return None
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        parts = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
        return [
            torch.from_dlpack(part.view(tensor.dtype).view(tensor.shape))
            for part, tensor in zip(parts, like, strict=True)
        ]

    def read_together(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Owns no memory: a weight whose own memory went away is not read as if it had not."""
        nbytes = sum(piece.numel() * piece.element_size() for piece in pieces)
        memory = (ctypes.c_char * nbytes).from_address(pieces[0].data_ptr())
        return torch.frombuffer(memory, dtype=pieces[0].dtype).view(-1, pieces[0].shape[1])

    def finish(self) -> None:
        pass


def stock_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A deep copy, which is a stock object even where `model` is enabled."""
    copied = copy.deepcopy(model)
    assert not hf_paged.is_enabled(copied)
    return copied


def stock_generate(model: PreTrainedModel, **kwargs: Any) -> torch.Tensor:
    return stock_copy(model).generate(**kwargs)


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """("returned", tensor), or ("raised", type): what stock and hf_paged must agree on."""
    torch.manual_seed(3)
    try:
        result = call()
    except Exception as error:
        return "raised", type(error)
    return "returned", result if isinstance(result, torch.Tensor) else result.sequences


def in_child(work: Callable[[], Any], seconds: float = 60.0) -> int:
    """Run `work` in a fork of this process; return its exit status: 0, or 1 after an error or after `seconds`.

    What other tests left to the garbage collector goes before: a gloo group that the child collects waits for ever for
    threads that only the parent has. Where the child hangs in spite of that, its stack is printed.
    """
    gc.collect()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def eos_ids(kwargs: dict[str, Any], model: PreTrainedModel) -> set[int]:
    value = kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def tokens_made(output: torch.Tensor, prompt_width: int, eos: set[int]) -> int:
    """Tokens that a generate call had to make: each row up to its first EOS, that one included."""
    made = 0
    for row in output[:, prompt_width:].tolist():
        ends = [i for i, token in enumerate(row) if token in eos]
        made += ends[0] + 1 if ends else len(row)
    return made


def assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape, f"\n{actual}\n{expected}"
    assert actual.dtype == expected.dtype
    assert actual.device == expected.device
    assert torch.equal(actual, expected), f"\n{actual}\n{expected}"


LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
"""Options with which stock's generate returns what `same_but_for_near_ties` compares with."""


def same_but_for_near_ties(actual: torch.Tensor, stock: Any, precision: torch.dtype = torch.bfloat16) -> bool:
    """Each row has stock's tokens, up to one that stock finds as good as its own within a few roundings of `precision`.

    `stock` is what stock's `generate` returned with `LOGITS`. In half precision two logits are often nearly equal, and
    the processor's kernels, which differ by the shape of a product, decide which of them is the larger.
    """
    if (actual.shape, actual.dtype) != (stock.sequences.shape, stock.sequences.dtype):
        return False
    width = actual.shape[1] - len(stock.logits)
    for row, (ours, theirs) in enumerate(zip(actual.tolist(), stock.sequences.tolist(), strict=True)):
        step = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)
        if step is None:
            continue
        if step < width:
            return False
        logits = stock.logits[step - width][row].float()
        margin = 8 * torch.finfo(precision).eps * logits[logits.isfinite()].abs().amax()
        if logits[theirs[step]] - logits[ours[step]] > margin:
            return False
    return True


def assert_same_but_for_near_ties(actual: torch.Tensor, stock: Any, precision: torch.dtype = torch.bfloat16) -> None:
    assert same_but_for_near_ties(actual, stock, precision), f"\n{actual}\n{stock.sequences}"


def computes_in(model: PreTrainedModel) -> torch.dtype:
    """The type of an ambient autocast, or of the model."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """All differences together are at most `share` of the expected values' norm: no one rounding decides."""
    assert actual.shape == expected.shape and torch.equal(actual.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    error = (actual[finite].double() - expected[finite].double()).norm() / expected[finite].double().norm()
    assert error <= share, f"{error} of the norm"


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which a test runner would take for its own."""


@contextmanager
def interrupted(at: int | None) -> Iterator[Callable[[], int]]:
    """Raise in this thread when it calls its `at`-th function of the package (None: never); yields the calls so far."""
    calls = 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event == "call" and "/hf_paged/" in code.co_filename and not code.co_name.startswith("<"):
            calls += 1
            if calls == at:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(look)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(None)


@contextmanager
def interrupted_behind(at: int | None, *files: str) -> Iterator[list[tuple[str, int]]]:
    """Raise in this thread behind the `at`-th call of a function written in C (None: never), where a Ctrl-C is noticed.

    Of calls by code in these files of the package; yields the files and lines of those so far.
    """
    places: list[tuple[str, int]] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "c_return" and frame.f_code.co_filename.endswith(files):
            places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(places) == at:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(look)
    try:
        yield places
    finally:
        sys.setprofile(None)


def assert_idle(model: PreTrainedModel) -> None:
    """Nothing runs or waits, and every block but the null block is free."""
    stats = hf_paged.get_engine(model).stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == max(stats.num_blocks - 1, 0)  # there may be no pool as yet


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once `condition` holds; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come to pass"
        time.sleep(0.001)


def is_idle(generator: hf_paged.PagedGenerator) -> bool:
    """Whether nothing runs or waits, and no awaited call that was left has requests to end."""
    stats, thread = generator.engine.stats(), generator._async_calls.thread
    return not stats.num_running + stats.num_waiting and not thread._calls and not thread._actions


def num_calls(model: PreTrainedModel) -> dict[str, int]:
    """How many calls of an enabled model took each path so far; those that took none left out."""
    stats = hf_paged.get_engine(model).stats().calls
    return {path: counted.num_calls for path, counted in stats.items() if counted.num_calls}


def assert_native_parity(model: PreTrainedModel, expected: Any = None, **kwargs: Any) -> torch.Tensor:
    """An enabled model's greedy generate equals stock's, and it was the engine that made exactly these tokens.

    `expected` is what stock's generate returned. With `LOGITS`, and in half precision, near ties may fall otherwise.
    """
    if expected is None:
        half = computes_in(model).itemsize == 2 and not kwargs.get("return_dict_in_generate")
        expected = stock_generate(model, **kwargs, **(LOGITS if half else {}))
    explained = hf_paged.explain(model, **kwargs)
    path = explained.path
    assert path != "stock", explained  # lockstep where a fixture wants it
    engine = hf_paged.get_engine(model)
    before = engine.stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_paged.FallbackWarning)
        actual = model.generate(**kwargs)
    if not isinstance(expected, torch.Tensor):
        assert_same_but_for_near_ties(actual, expected)
        expected = actual
    assert_same_tensor(actual, expected)
    after = engine.stats()
    made = tokens_made(expected, kwargs["input_ids"].shape[1], eos_ids(kwargs, model))
    assert after.num_generated_tokens - before.num_generated_tokens == made
    counts = [(stats.calls[path].num_calls, stats.calls[path].num_tokens) for stats in (before, after)]
    assert counts[1] == (counts[0][0] + 1, counts[0][1] + made)
    assert_idle(model)
    return actual


def assert_native_beside_others(model: PreTrainedModel, long_tokens: int = 40, margin: float = 0.0) -> None:
    """Of a model that is not enabled yet: batches, and a short call that ends while another thread's still runs.

    All give stock's greedy tokens, made by the engine; with a `margin` the long call's may be others whose logit in
    stock's forward is at most so much below the largest (layers that round activations enlarge what another order of
    sums changes). The model stays enabled.
    """
    inputs, long, short = batch([40, 33, 7]), batch([20], seed=3), batch([9], seed=4)
    wanted = [(inputs, 8), (long, long_tokens), (short, 3)]
    expected = [model.generate(**given, max_new_tokens=count) for given, count in wanted]
    hf_paged.enable(model, strict=True)
    engine, found = hf_paged.get_engine(model), []
    assert_native_parity(model, expected[0], **inputs, max_new_tokens=8)
    assert_native_parity(model, expected[0], **inputs, max_new_tokens=8)
    assert engine.stats().prefix_cache_hits == 32 + 32  # full blocks of both prompts
    before = engine.stats().num_generated_tokens
    thread = threading.Thread(target=lambda: found.append(model.generate(**long, max_new_tokens=long_tokens)))
    thread.start()
    while thread.is_alive() and not engine.stats().num_running:
        time.sleep(0.001)
    assert_same_tensor(model.generate(**short, max_new_tokens=3), expected[2])
    assert thread.is_alive(), "the long call ended first"
    thread.join()
    if margin and not torch.equal(found[0], expected[1]):
        logits = model(found[0]).logits[0, long["input_ids"].shape[1] - 1 : -1]
        chosen = logits.gather(1, found[0][0, long["input_ids"].shape[1] :, None])[:, 0]
        assert (logits.amax(1) - chosen).amax() <= margin
    else:
        assert_same_tensor(found[0], expected[1])
    assert engine.stats().num_generated_tokens - before == long_tokens + 3
    assert_idle(model)


def assert_lockstep(model: PreTrainedModel, *, call: Any = None, paged: dict[str, Any] | None = None,
                    **kwargs: Any) -> Any:
    """A seeded call that gives stock's very tokens (and scores, where asked for) without going to stock.

    `call(model, **kwargs)` stands in for `model.generate`. The model stays enabled, with `paged` as settings. Returns
    what the enabled model returned.
    """
    is_generate = call is None
    call = call or (lambda model, **kwargs: model.generate(**kwargs))
    hf_paged.disable(model)

    def run() -> Any:
        torch.manual_seed(0)
        return call(model, **kwargs)

    expected = run()
    hf_paged.enable(model, **({"strict": True} | (paged or {})))
    actual = run()
    assert hf_paged.get_engine(model).stats().num_generated_tokens > 0
    if is_generate:
        assert num_calls(model) == {hf_paged.explain(model, **kwargs).path: 1}
    assert_idle(model)
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(actual, expected)
        return actual
    assert list(actual.keys()) == list(expected.keys())
    assert_same_tensor(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        if expected.get(name) is not None:
            assert_close_steps(actual[name], expected[name])
    if expected.get("sequences_scores") is not None:
        assert torch.allclose(actual.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
    if expected.get("beam_indices") is not None and isinstance(expected.beam_indices, torch.Tensor):
        assert_same_tensor(actual.beam_indices, expected.beam_indices)
    return actual


def assert_close_steps(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Scores of every step: same number, shape and dtype, -inf in the same places, values close."""
    assert len(actual) == len(expected)
    for ours, stocks in zip(actual, expected, strict=True):
        assert ours.shape == stocks.shape and ours.dtype == stocks.dtype
        assert torch.equal(ours.isinf(), stocks.isinf())
        assert torch.allclose(ours, stocks, rtol=1e-4, atol=1e-4)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, made in memory: for tests that need some tokenizer but not a trained one."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", pad_token=alphabet[0])


def run_out(engine: Any, outputs: list[StepOutput] | None = None) -> list[StepOutput]:
    """Step until no request of `add_request` is left; returns all outputs, which are appended to ``outputs``."""
    outputs = [] if outputs is None else outputs
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def byte_generator() -> Iterator[hf_paged.PagedGenerator]:
    """A fixture: a generator over bytes, which has nothing left to do at the end."""
    with hf_paged.PagedGenerator(tiny_model(), byte_tokenizer()) as generator:
        yield generator
        assert_idle(generator.model)


def lent(shared: Callable[[], PreTrainedModel]) -> Any:
    """A fixture of a model that tests share: it is disabled after each."""
    @pytest.fixture(name="model")
    def lend() -> Iterator[PreTrainedModel]:
        yield shared()
        hf_paged.disable(shared())

    return lend


def assert_falls_back(model: PreTrainedModel, reason: str, *, call: Any = None, **kwargs: Any) -> Any:
    """A call of a model that is not enabled yet, then enabled, then strict: stock's result, one warning, an error.

    `reason` is a regular expression for the message; `call(model, **kwargs)` stands in for `model.generate`.
    Returns stock's result.
    """
    is_generate = call is None
    call = call or (lambda model, **kwargs: model.generate(**kwargs))
    torch.manual_seed(0)
    expected = call(model, **kwargs)
    foreseen = [hf_paged.explain(model, **kwargs)] if is_generate else []
    hf_paged.enable(model)
    try:
        engine = hf_paged.get_engine(model)
        foreseen += [hf_paged.explain(model, **kwargs)] if is_generate else []
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = call(model, **kwargs)
        messages = [str(w.message) for w in caught if issubclass(w.category, hf_paged.FallbackWarning)]
        assert len(messages) == 1, messages
        assert re.search(reason, messages[0]), messages[0]
        if isinstance(expected, torch.Tensor):
            assert_same_tensor(actual, expected)
        else:
            assert type(actual) is type(expected)
            assert_same_tensor(actual["sequences"], expected["sequences"])
        assert engine.stats().num_generated_tokens == 0
        assert num_calls(model) == {"stock": 1}
        [kind] = engine.stats().calls["stock"].by_reason
        for explained in foreseen:
            assert explained == foreseen[0] and explained.path == "stock"
            assert explained.reasons[0].kind == kind
            assert f"{explained.reasons[0]}. {explained.remedies[0]}" in messages[0]
        hf_paged.enable(model, strict=True)
        with pytest.raises(hf_paged.FallbackError, match=reason):
            call(model, **kwargs)
    finally:
        hf_paged.disable(model)
    return expected


class Until(StoppingCriteria):
    """Row i is done at width + i."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.width + torch.arange(len(input_ids))


class RecordingStreamer:
    """Keeps what `generate` puts, as lists."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def lookup_chat(facts: dict[str, str], key: str) -> list[dict[str, str]]:
    """A chat as the tiny trained model knows it: a table as system prompt, one question."""
    table = "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in facts.items())
    return [{"role": "system", "content": table}, {"role": "user", "content": f"What is the code of {key}?"}]


def lookup_facts(count: int, seed: int = 0) -> dict[str, str]:
    """A table of codes in the trained model's words."""
    rng = random.Random(seed)
    names = rng.sample([f"{adjective}-{animal}" for adjective in ADJECTIVES for animal in ANIMALS], count)
    return {name: str(rng.randint(1000, 9999)) for name in names}


def assert_native_tokens(wrapped: Any, expected: torch.Tensor, inputs: dict[str, torch.Tensor], **kwargs: Any) -> None:
    """`wrapped.generate` gives `expected`, made by the engine of the model inside; for calls without EOS."""
    engine = hf_paged.get_engine(wrapped)
    before = engine.stats().num_generated_tokens
    assert_same_tensor(wrapped.generate(**inputs, **kwargs), expected)
    width = inputs["input_ids"].shape[1]
    assert engine.stats().num_generated_tokens - before == expected[:, width:].numel()
