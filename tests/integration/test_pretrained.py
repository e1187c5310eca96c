"""What `PagedGenerator.from_pretrained` hands on to transformers, and what it refuses."""

from __future__ import annotations

import inspect

import pytest
import torch
from support import byte_tokenizer, random_prompts, stock_generate, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_paged import PagedGenerator
from hf_paged.integration import pretrained
from hf_paged.integration.pretrained import OF_FILES, OF_TOKENIZERS, one_device, split_arguments

PROMPT = random_prompts([9])[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder / "inside", variant="other")
    tiny_model(seed=1).save_pretrained(folder / "inside")
    byte_tokenizer().save_pretrained(folder / "inside")
    return folder


@pytest.fixture
def seen(monkeypatch):
    """The keywords that model and tokenizer were loaded with."""
    calls = {}
    for name, auto in (("model", AutoModelForCausalLM), ("tokenizer", AutoTokenizer)):
        load = auto.from_pretrained

        def spy(*args, _name=name, _load=load, **keywords):
            calls[_name] = keywords
            return _load(*args, **keywords)

        monkeypatch.setattr(auto, "from_pretrained", spy)
    return calls


def tokens(generator):
    return generator.generate([PROMPT], max_new_tokens=4)[0].token_ids


def test_arguments_reach_the_model_and_those_of_files_the_tokenizer(path, seen):
    files = {"subfolder": "inside", "revision": "main", "token": None, "cache_dir": None, "local_files_only": True}
    model_only = {"variant": "other", "use_safetensors": True, "attn_implementation": "eager"}
    with PagedGenerator.from_pretrained(path, **files, **model_only, num_blocks=20, device="cpu") as generator:
        assert generator.model.config._attn_implementation == "eager"
        assert generator.engine.config.num_blocks == 20
        expected = stock_generate(tiny_model(), input_ids=torch.tensor([PROMPT]), max_new_tokens=4)
        assert tokens(generator) == expected[0, len(PROMPT) :].tolist()  # the variant's weights
        assert generator.tokenizer is not None
    assert seen["tokenizer"] == {**files, "trust_remote_code": False, "padding_side": "left"}
    assert seen["model"] == {**files, **model_only, "trust_remote_code": False, "dtype": "auto"}


def test_names_are_those_of_transformers():
    hub = {"cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder"}
    assert hub == OF_FILES
    assert {*hub, "trust_remote_code", "code_revision"} == OF_TOKENIZERS
    fields = set(inspect.signature(PreTrainedModel.from_pretrained).parameters)
    loading, overrides = split_arguments(dict.fromkeys(fields - {"config", "kwargs"}), "auto", "cpu", None, False)
    assert not overrides and loading.arguments.keys() >= fields - {"config", "kwargs"}  # no name of a PagedConfig's


def test_what_transformers_does_not_know_raises_as_it_does(path):
    with pytest.raises(TypeError, match="blocksize"):
        PagedGenerator.from_pretrained(path, subfolder="inside", blocksize=3)
    with PagedGenerator.from_pretrained(path / "inside", rms_norm_eps=0.5, torch_dtype="bfloat16") as generator:
        assert generator.model.config.rms_norm_eps == 0.5
        assert generator.model.dtype is torch.bfloat16
    with pytest.raises(TypeError, match="output_loading_info"):
        PagedGenerator.from_pretrained(path, output_loading_info=True)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, torch.device("cpu"), {"model": "cpu", "lm_head": "cpu"}])
def test_a_device_map_to_one_device(path, device_map):
    with PagedGenerator.from_pretrained(path / "inside", device_map=device_map) as generator:
        assert generator.model.device.type == "cpu"
        assert len(tokens(generator)) == 4


def test_device_maps(monkeypatch):
    assert one_device(1) == one_device("cuda:1") == one_device({"": 1}) == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert one_device("auto") == pretrained._default_device()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for several in ("auto", "balanced", {"a": 0, "b": 1}, {"a": 0, "b": "cpu"}, {"": "disk"}):
        with pytest.raises(ValueError, match=r"tensor_parallel_size=N.*data_parallel"):
            one_device(several)
    for wrong in (1.5, {}, ["cpu"]):
        with pytest.raises(TypeError, match="device_map"):
            one_device(wrong)
    with pytest.raises(ValueError, match="expected one of them"):
        PagedGenerator.from_pretrained("nowhere", device="cpu", device_map="cpu")


@pytest.mark.parametrize("arguments", [
    {"quantization_config": {"a": 1}}, {"attn_implementation": "eager"}, {"trust_remote_code": True},
    {"variant": "other"}, {"use_safetensors": False}, {"rms_norm_eps": 0.5},
])
def test_several_ranks_refuse_what_they_cannot_carry_out(path, arguments):
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))}=.*tensor_parallel_size=2"):
        PagedGenerator.from_pretrained(path / "inside", tensor_parallel_size=2, device="cpu", **arguments)


@pytest.mark.slow
def test_several_ranks_find_files_where_they_are_said_to_be(path):
    with PagedGenerator.from_pretrained(path, tensor_parallel_size=2, device_map="cpu", subfolder="inside",
                                        use_safetensors=True, num_blocks=20) as generator:
        expected = stock_generate(tiny_model(seed=1), input_ids=torch.tensor([PROMPT]), max_new_tokens=4)
        assert tokens(generator) == expected[0, len(PROMPT) :].tolist()
        assert generator.tokenizer is not None
        made = generator.generate([PROMPT, [], PROMPT], max_new_tokens=4, on_error="complete")
        assert [c.finish_reason for c in made] == ["length", "error", "length"]
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            generator.generate([PROMPT, []], max_new_tokens=4)
