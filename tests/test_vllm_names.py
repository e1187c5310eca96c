"""Names of vLLM, misspelt names and names of another function are answered with what to write."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re

import pytest
import torch
from support import byte_tokenizer, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedConfig, PagedGenerator
from hf_paged.options.keywords import OF_CALL
from hf_paged.options.request_spec import PLAIN
from hf_paged.vllm_names import LOADING, METHODS, SAMPLING, unknown_names

FIELDS = {field.name for field in dataclasses.fields(PagedConfig)}
OF_GENERATE = {*inspect.signature(PagedGenerator.generate).parameters} - {"self", "generate_kwargs"}
OF_FROM_PRETRAINED = {*inspect.signature(PagedGenerator.from_pretrained).parameters} - {"kwargs"}
OF_TRANSFORMERS = {"cache_dir", "token", "quantization_config", "output_hidden_states", "num_beams", "logits_processor"}


@pytest.fixture(scope="module")
def generator():
    with PagedGenerator(tiny_model(), byte_tokenizer(), num_blocks=16) as generator:
        yield generator


def astream(generator, **keywords):
    async def run():
        return [item async for item in generator.astream([3], **keywords)]

    return asyncio.run(run())


CALLS = {
    "generate": lambda generator, **keywords: generator.generate([3], **keywords),
    "stream": lambda generator, **keywords: generator.stream([3], **keywords),
    "agenerate": lambda generator, **keywords: asyncio.run(generator.agenerate([3], **keywords)),
    "astream": astream,
}
CONFIGURED = {
    "PagedConfig": lambda generator, **keywords: PagedConfig(**keywords),
    "enable": lambda generator, **keywords: hf_paged.enable(tiny_model(), **keywords),
    "PagedGenerator": lambda generator, **keywords: PagedGenerator(tiny_model(), **keywords),
}
LOADED = {
    "from_pretrained": lambda path, **keywords: PagedGenerator.from_pretrained(path, **keywords),
    "over ranks": lambda path, **keywords: PagedGenerator.from_pretrained(path, tensor_parallel_size=2, **keywords),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("call", CALLS)
def test_settings_of_vllm_in_a_call(generator, call, name):
    with pytest.raises(ValueError, match=re.escape(f"{name}=1: {SAMPLING[name]}")):
        CALLS[call](generator, max_new_tokens=2, **{name: 1})


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*LOADING, "tensor_parallel_size"])
@pytest.mark.parametrize("call", CONFIGURED)
def test_arguments_of_vllm_for_a_model_in_memory(call, name):
    answer = LOADING.get(name, "expected it as an argument of PagedGenerator.from_pretrained")
    with pytest.raises(TypeError, match=re.escape(f"{name}=1: {answer}")):
        CONFIGURED[call](None, **{name: 1})


@pytest.mark.each_value
@pytest.mark.parametrize("name", LOADING)
@pytest.mark.parametrize("call", LOADED)
def test_arguments_of_vllm_for_a_checkpoint(call, name):
    """Nothing is looked for before: there is no such checkpoint."""
    with pytest.raises(TypeError, match=re.escape(f"{name}=1: {LOADING[name]}")):
        LOADED[call]("nowhere", **{name: 1})


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_vllm(generator, name):
    assert not hasattr(generator, name)
    with pytest.raises(AttributeError, match=re.escape(METHODS[name])):
        getattr(generator, name)
    with pytest.raises(AttributeError, match="'PagedGenerator' object has no attribute 'generat'"):
        generator.generat  # noqa: B018


@pytest.mark.each_value
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "answer"), [
    ("max_new_token", "expected max_new_tokens"), ("temprature", "expected temperature"),
    ("adapter_name", "expected adapter_names"), ("on_eror", "expected on_error"), ("cach_salt", "expected cache_salt"),
    ("toplogprobs", "expected top_logprobs"), ("tool", "expected tools"),
    ("max_num_seqs", "an argument of PagedGenerator.from_pretrained, PagedGenerator or hf_paged.enable"),
    ("gpu_memory_utilization", "an argument of PagedGenerator.from_pretrained, PagedGenerator or hf_paged.enable"),
    ("tensor_parallel_size", "an argument of PagedGenerator.from_pretrained"), ("streamer", "of model.generate"),
    ("swap_space", LOADING["swap_space"]), ("zzz", "expected fields of a GenerationConfig"),
])
def test_other_names_in_a_call(generator, call, name, answer):
    with pytest.raises(ValueError, match=f"^{name}=1: .*{re.escape(answer)}"):
        CALLS[call](generator, max_new_tokens=2, **{name: 1})


@pytest.mark.parametrize(("name", "answer"), [
    ("max_num_seq", "expected max_num_seqs"), ("enforce_eagr", "expected enforce_eager"),
    ("temperature", "an argument of PagedGenerator.generate or model.generate"), ("max_tokens", SAMPLING["max_tokens"]),
    ("zzz", "expected a field of PagedConfig"),
])
def test_other_names_in_a_config(name, answer):
    for call in CONFIGURED.values():
        with pytest.raises(TypeError, match=f"^{name}=1: .*{re.escape(answer)}"):
            call(None, **{name: 1})


@pytest.mark.parametrize(("name", "answer"), [
    ("max_num_seq", "expected max_num_seqs"), ("cache_dirr", "expected cache_dir"),
    ("tensor_parallel", "expected tensor_parallel_size"), ("temperature", "expected it as an argument of generate"),
    ("max_tokens", SAMPLING["max_tokens"]), ("zzz", "expected"),
])
@pytest.mark.parametrize("call", LOADED)
def test_other_names_beside_a_checkpoint(trained_path, call, name, answer):
    with pytest.raises((TypeError, ValueError), match=f"^{name}=1: .*{re.escape(answer)}"):
        LOADED[call](trained_path, **{name: 1})


@pytest.mark.parametrize("text", ["a is no b", "__init__() got an unexpected keyword argument 'its_own'"])
def test_a_type_error_of_the_models_own_is_left_alone(monkeypatch, trained_path, text):
    def fails(*args, **kwargs):
        raise TypeError(text)

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        PagedGenerator.from_pretrained(trained_path)


def test_sampling_params_by_place(generator):
    kind = type("SamplingParams", (), {})
    for config in (kind(), [kind()]):
        with pytest.raises(TypeError, match=r"generation_config=.*write its fields as arguments"):
            generator.generate([[3]], config, max_new_tokens=2)


@pytest.mark.parametrize("make", [lambda name: PagedGenerator(tiny_model(), name),
                                  lambda name: PagedGenerator.from_pretrained("nowhere", tokenizer=name)])
def test_a_tokenizer_by_its_name(make):
    with pytest.raises(TypeError, match=r"tokenizer='x/y': expected None, a tokenizer or a .*from_pretrained\('x/y'\)"):
        make("x/y")


def test_several_names_are_answered_together():
    with pytest.raises(TypeError, match=r"^max_loras=2: .*; swap_space=1: "):
        PagedConfig(swap_space=1, max_loras=2)
    said = unknown_names({"block_size": 1}, FIELDS, {}, {}, "expected it left out")
    assert said == "block_size=1: expected it left out"


def test_the_model_keeps_stocks_exception():
    model = hf_paged.enable(tiny_model())
    with pytest.raises(ValueError, match=r"model_kwargs.*max_tokens"):
        model.generate(torch.tensor([[3]]), max_tokens=3)


def test_the_answer_about_the_tokenizers_arguments_cuts_a_chat(generator):
    written = re.search(r"chat_template_kwargs=(\{.*?\})", SAMPLING["tokenization_kwargs"])[1]
    chat, template = [{"role": "user", "content": "a long text"}], "{{ messages[0].content }}"
    keywords = {"chat_template": template, **ast.literal_eval(written.replace(" n}", " 5}"))}
    [made] = generator.generate(chat, max_new_tokens=1, chat_template_kwargs=keywords)
    stock = generator.tokenizer.apply_chat_template(chat, **keywords)["input_ids"]
    assert made.prompt_token_ids == stock and len(stock) == 5


def test_what_is_accepted_here_has_no_answer():
    assert not SAMPLING.keys() & (OF_GENERATE - {"prompts"} | {*vars(GenerationConfig())})
    assert not LOADING.keys() & (FIELDS | OF_FROM_PRETRAINED)
    assert not METHODS.keys() & {*dir(PagedGenerator), "model", "engine"}


def test_what_the_answers_name_exists():
    """Every argument that is to be written is one of a function of hf_paged or transformers."""
    known = {*OF_GENERATE, *OF_FROM_PRETRAINED, *FIELDS, *vars(GenerationConfig()), *OF_TRANSFORMERS}
    written = {name for table in (SAMPLING, LOADING, METHODS) for answer in table.values()
               for name in re.findall(r"\b(\w+)=", answer)}
    assert len(written) > 20 and not written - known
    methods = {name for answer in METHODS.values() for name in re.findall(r"generator\.(\w+)", answer)}
    assert {"model", "engine"} <= methods and methods <= {*dir(PagedGenerator), "model", "engine"}


def test_the_arguments_of_a_call_are_known():
    assert {"prompts", "generation_config", *OF_CALL, *PLAIN, "use_tqdm"} == OF_GENERATE
