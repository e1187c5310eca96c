"""The engine's tensors depend on nothing that a user's process may have set for torch's own."""

from __future__ import annotations

import ast
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from family_models import family_model
from support import assert_idle, assert_same_tensor, batch, byte_tokenizer, random_prompts, run_out, tiny_model
from threads import run_threads
from transformers import GenerationConfig

import hf_paged
from hf_paged.options.arguments import merge_config
from hf_paged.options.settings import request_spec

PACKAGE = Path(hf_paged.__file__).parent
# Of integers: their dtype is int64 whatever the default is.
OF_INTEGERS = {"arange", "randperm"}
FACTORIES = OF_INTEGERS | {
    "zeros", "ones", "empty", "full", "tensor", "as_tensor", "asarray", "rand", "randn", "randint", "linspace",
    "logspace", "eye", "scalar_tensor", "empty_strided",
}
PROMPTS = random_prompts([21, 9, 30], seed=3)
CALLS = [
    {"max_new_tokens": 10},
    {"max_new_tokens": 10, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"max_new_tokens": 10, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]],
     "sequence_bias": [[[11], 2.0], [[12, 13], -0.5]], "suppress_tokens": [3, 4], "begin_suppress_tokens": [9],
     "exponential_decay_length_penalty": (2, 1.1), "eos_token_id": 17, "min_new_tokens": 3, "forced_eos_token_id": 17,
     "remove_invalid_values": True, "renormalize_logits": True},
    {"max_new_tokens": 10, "do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001},
    {"max_new_tokens": 10, "stop_strings": ["q"], "eos_token_id": 17},
]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AMBIENT = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def test_every_tensor_names_its_dtype_and_device():
    """In the source: each factory function of torch is given both, wherever a tensor is made.

    Proofs run in a thread of their own, which has no caller's defaults but torch's dtype, of which they ask first.
    """
    bare = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parts[-2] in ("proof", "derivation", "checks"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                    and node.func.attr in FACTORIES):
                continue
            wanted = {"device"} if node.func.attr in OF_INTEGERS else {"device", "dtype"}
            if missing := wanted - {keyword.arg for keyword in node.keywords}:
                bare.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.func.attr}: {sorted(missing)}")
    assert bare == []


def run(engine):
    """Every call of `CALLS` for every prompt, all in the same steps, with log-probabilities."""
    ids = [engine.add_request(prompt, GenerationConfig(**call), seed=7, logprobs=True, prompt_logprobs=number == 0)
           for number, call in enumerate(CALLS) for prompt in PROMPTS]
    made = {}
    made |= {o.request_id: o.completion for o in run_out(engine) if o.completion is not None}
    return [(made[i].token_ids, made[i].finish_reason, made[i].error) for i in ids]


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("ambient", [name for name in AMBIENT if name != "autocast"])
def test_an_engine_makes_the_same_tokens(ambient, family):
    """A whole life of an engine, from its first allocation on, in a thread whose surroundings are odd."""
    models = [tiny_model() if family == "qwen3" else family_model(family) for _ in range(2)]
    expected = run(hf_paged.Engine(models[0], hf_paged.PagedConfig(), byte_tokenizer()))
    assert all(error is None for _, _, error in expected)
    found = []

    def work():
        with AMBIENT[ambient]():
            config = hf_paged.PagedConfig(num_blocks=20)  # with preemption
            engine = hf_paged.Engine(models[1], config, byte_tokenizer())
            found.append(run(engine))
            found.append(run(engine))  # from the cache

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [expected, expected]


@pytest.mark.parametrize("ambient", list(AMBIENT))
def test_surroundings_of_one_caller_do_not_reach_another(ambient):
    """Two threads share steps; one of them drives them under odd surroundings, and both get stock's tokens."""
    model, stock = tiny_model(), tiny_model()
    kwargs = {"max_new_tokens": 24, "repetition_penalty": 1.2, "eos_token_id": 17, "suppress_tokens": [3]}
    expected = [stock.generate(**batch([n], seed=n), **kwargs) for n in (21, 9)]
    hf_paged.enable(model)
    settings = request_spec(merge_config(model, GenerationConfig(**kwargs), {}), 21, 256)
    results = [[], []]

    def work(number, surroundings):
        inputs = batch([(21, 9)[number]], seed=(21, 9)[number])
        for _ in range(4):
            with surroundings():
                results[number].append(model.generate(**inputs, **kwargs) if number else run_odd(model, inputs, kwargs))

    def run_odd(model, inputs, kwargs):
        engine = hf_paged.get_engine(model)
        with engine.session() as session:  # no code of stock's, which fails by itself in some of these
            engine.add(session, settings.but(prompt=inputs["input_ids"][0].tolist()))
            outputs = []
            while session.unfinished():
                outputs += engine.advance([session])[0]
        return outputs[-1].completion.token_ids

    threads = [threading.Thread(target=work, args=(0, AMBIENT[ambient])),
               threading.Thread(target=work, args=(1, lambda: torch.autocast("cpu", enabled=False)))]
    run_threads(threads)
    assert results[0] == [expected[0][0, 21:].tolist()] * 4
    for result in results[1]:
        assert_same_tensor(result, expected[1])
    assert_idle(model)
