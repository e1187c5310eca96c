"""LoRA adapters on a generator over two ranks: each row's tokens are those of PEFT's own model under its adapter."""

from __future__ import annotations

import signal

import peft
import pytest
import torch
from lora_models import ALL_LINEAR, lora_config, with_adapter
from ranks import run_ranks
from support import random_prompts, stock_generate, tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator, PartlyLoadedError
from hf_paged.engine.ranks import weight_transfer

pytestmark = pytest.mark.slow  # further cases over ranks

VOCAB = 2600
SHAPE = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = random_prompts([5, 17, 40, 33], vocab_size=VOCAB)
NEW = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base model, and adapters "red" and "blue", which differ in rank, targets, bias and scaling."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_model(**SHAPE).save_pretrained(folder / "base")
    model = with_adapter(tiny_model(**SHAPE), "red", 1)
    model = with_adapter(model, "blue", 2, ("q_proj", "o_proj", "down_proj"), lora_bias=True, use_rslora=True,
                         rank_pattern={"o_proj": 7})
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stock(folders):
    """Tokens of PEFT's model by adapter, for each prompt."""
    model, found = peft.PeftModel.from_pretrained(tiny_model(**SHAPE), folders / "red", "red"), {}
    model.load_adapter(folders / "blue", "blue")
    for name in ("red", "blue"):
        model.set_adapter(name)
        found[name] = [tokens_of(model, prompt) for prompt in PROMPTS]
    with model.disable_adapter():
        found["__base__"] = [tokens_of(model, prompt) for prompt in PROMPTS]
    for i in range(len(PROMPTS)):
        assert len({tuple(tokens[i]) for tokens in found.values()}) == 3, "the adapters make no difference"
    return found


def tokens_of(model, prompt):
    return stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=NEW)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def shared(folders):
    with PagedGenerator.from_pretrained(folders / "base", tensor_parallel_size=2, overlap=True) as generator:
        yield generator


@pytest.fixture(params=["sharded", "one process"])
def generator(request, folders):
    """Without adapters, before and after."""
    if request.param == "sharded":
        generator = request.getfixturevalue("shared")
        yield generator
        for name in generator.engine.adapter_names:
            generator.delete_adapter(name)
        assert len(list(generator.named_weights())) == len(tiny_model(**SHAPE).state_dict())
    else:
        with PagedGenerator(tiny_model(**SHAPE)) as generator:
            yield generator


@pytest.fixture
def both(generator, folders):
    """With "red" from its directory and "blue" from its state dict."""
    generator.load_adapter("red", folders / "red")
    state = peft.load_peft_weights(str(folders / "blue"))
    generator.load_adapter("blue", state, peft.PeftConfig.from_pretrained(folders / "blue").to_dict())
    return generator


def made(generator, names):
    return [c.token_ids for c in generator.generate(PROMPTS, max_new_tokens=NEW, adapter_names=names)]


@pytest.mark.core
def test_every_row_has_the_tokens_of_its_adapter(both, stock):
    assert both.engine.adapter_names == ("blue", "red")
    for names in (["red", "blue", None, "__base__"], ["__base__", "red", "red", "blue"], "blue", None):
        rows = [names] * len(PROMPTS) if names is None or isinstance(names, str) else names
        expected = [stock[name or "__base__"][i] for i, name in enumerate(rows)]  # a loaded adapter is not active
        assert made(both, names) == expected
    both.set_adapter("blue")
    assert made(both, None) == stock["blue"] and made(both, ["red"] * len(PROMPTS)) == stock["red"]
    both.set_adapter(None)
    assert made(both, None) == stock["__base__"]


def test_cached_prefixes_belong_to_an_adapter(both):
    def hits(name):
        return both.generate(PROMPTS[2:3], max_new_tokens=2, adapter_names=name)[0].num_cached_tokens

    for name in ("red", "blue", None):
        assert hits(name) == 0
    for name in ("red", "blue", None):
        assert hits(name) > 0


def test_requests_that_run_while_adapters_come_and_go(generator, folders, stock):
    """Those of others go on; one whose adapter is deleted ends with that."""
    engine = generator.engine
    generator.load_adapter("red", folders / "red")
    asked = {engine.add_request(prompt, GenerationConfig(max_new_tokens=NEW), adapter_name=name): (i, name)
             for i, (prompt, name) in enumerate(zip(PROMPTS, ["red", None, "red", None], strict=True))}
    done = {}

    def steps(count):
        for _ in range(count):
            done.update((o.request_id, o.completion) for o in engine.step() if o.completion)

    steps(3)
    generator.load_adapter("blue", folders / "blue")
    steps(2)
    generator.delete_adapter("blue")
    while engine.has_unfinished():
        steps(1)
    for request_id, (i, name) in asked.items():
        assert done[request_id].token_ids == stock[name or "__base__"][i]

    gone = engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=NEW), adapter_name="red")
    stays = engine.add_request(PROMPTS[1], GenerationConfig(max_new_tokens=NEW))
    steps(2)
    generator.delete_adapter("red")
    while engine.has_unfinished():
        steps(1)
    assert done[gone].finish_reason == "error" and "no adapter 'red'" in done[gone].error
    assert done[stays].token_ids == stock["__base__"][1]
    with pytest.raises(ValueError, match="no adapter 'red'"):
        generator.generate(PROMPTS, adapter_names="red")


def changed(state, change):
    name = next(iter(state))
    return change(dict(state), name)


WRONG = [
    ("embedding", lambda s: s, {"target_modules": ["embed_tokens"]}, ValueError, "adapter of this kind|lack"),
    ("head", lambda s: s, {"target_modules": ["lm_head"]}, ValueError, "adapter of this kind|is no tensor|lack"),
    ("dora", lambda s: s, {"use_dora": True}, ValueError, "config.use_dora=True"),
    ("saved", lambda s: s, {"modules_to_save": ["norm"]}, ValueError, "config.modules_to_save"),
    ("missing", lambda s: changed(s, lambda s, n: {k: v for k, v in s.items() if k != n}), {}, ValueError,
     "weights lack .*expected every tensor of the adapter"),
    ("shape", lambda s: changed(s, lambda s, n: s | {n: s[n][:, :-1]}), {}, ValueError, "has shape"),
    ("unknown", lambda s: s | {"base_model.model.model.norm.weight": torch.ones(3)}, {}, ValueError, "neither lora_A"),
    ("other", lambda s: s | {"base_model.model.model.norm.lora_A.weight": torch.ones(3)}, {}, ValueError,
     "no tensor of the adapter"),
    ("path", lambda s: 3, {}, TypeError, "expected a directory or a dict"),
]


@pytest.mark.parametrize(("state", "config", "error", "message"), [row[1:] for row in WRONG],
                         ids=[row[0] for row in WRONG])
def test_what_is_wrong_with_an_adapter_leaves_the_model_without_it(generator, folders, stock, state, config, error,
                                                                   message):
    given = state(peft.load_peft_weights(str(folders / "red")))
    targets = config.pop("target_modules", ALL_LINEAR) if "target_modules" in (config := dict(config)) else ALL_LINEAR
    with pytest.raises((error, PartlyLoadedError), match=message):
        generator.load_adapter("green", given, lora_config(targets, **config))
    assert generator.engine.adapter_names == () and not hasattr(generator.model.model.layers[0].mlp.up_proj, "lora_A")
    generator.load_adapter("green", folders / "red")
    assert made(generator, "green") == stock["red"]
    with pytest.raises(ValueError, match="the model has an adapter of this name"):
        generator.load_adapter("green", folders / "blue")
    assert made(generator, "green") == stock["red"]


@pytest.mark.parametrize(("name", "error"), [("", ValueError), ("a.b", ValueError), ("__base__", ValueError),
                                             (3, TypeError)])
def test_names_that_are_none(generator, folders, name, error):
    with pytest.raises(error, match="name="):
        generator.load_adapter(name, folders / "red")
    with pytest.raises(ValueError, match="since the model has no adapter"):
        generator.delete_adapter("red")


def test_an_adapters_weights_are_written_and_read_by_name(both, folders, stock):
    """What a trainer that updates the adapter alone sends, in steps of its own."""
    state = {name: tensor for name, tensor in both.named_weights() if ".red." in name}
    saved = peft.load_peft_weights(str(folders / "red"))
    assert len(state) == len(saved) == 2 * 2 * len(ALL_LINEAR)
    for name, tensor in state.items():
        assert torch.equal(tensor, saved[f"base_model.model.{name.replace('.red.', '.')}"])
    both.load_weights({name: torch.zeros_like(tensor) for name, tensor in state.items()}, partial=True)
    assert made(both, ["red", "blue", "red", None]) == [
        stock["__base__"][0], stock["blue"][1], *stock["__base__"][2:]]
    both.load_weights(iter(state.items()), partial=True)
    assert made(both, "red") == stock["red"]


def test_where_every_rank_runs_the_script(folders, stock):
    """Also where KV heads lie on several ranks."""
    for size in (2, 4):
        for result in run_ranks("rank_checks:load_adapter", size, str(folders), PROMPTS, NEW):
            assert result["tokens"] == stock["red"]
            assert result["base"] == stock["__base__"]
            assert result["error"] == ("ValueError" if result["rank"] == 0 else "TypeError")


@pytest.mark.parametrize(("function", "method", "name", "then"), [
    ("activate", "set_adapter", "blue", "blue"), ("remove_adapter", "delete_adapter", "red", "__base__")])
def test_an_interrupt_parts_no_ranks(shared, folders, stock, monkeypatch, function, method, name, then):
    """SIGINT comes when rank 0 has changed its adapters, and the other rank has not."""
    change = getattr(weight_transfer, function)

    def interrupted(*args):
        change(*args)
        signal.raise_signal(signal.SIGINT)

    for one in ("red", "blue"):
        shared.load_adapter(one, folders / one)
    shared.set_adapter("red")
    monkeypatch.setattr(weight_transfer, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(shared, method)(name)
    monkeypatch.undo()
    assert made(shared, None) == stock[then]
    for one in shared.engine.adapter_names:
        shared.delete_adapter(one)


def test_ranks_whose_scripts_differ_raise_together(folders, stock):
    """Each of them, and all have the adapters from before."""
    for errors, *tokens in run_ranks("rank_checks:differing_adapters", 2, str(folders), PROMPTS, NEW, timeout=90.0):
        assert errors == {"other names": "ValueError", "unknown": "ValueError", "deleted": "ValueError",
                          "loaded": "ValueError", "half": errors["half"]} and "Error" in errors["half"]
        assert tokens == [stock["red"], stock["blue"]]
