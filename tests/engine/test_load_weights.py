"""New weights by their names into an enabled model: in place, in the middle of requests, all of them or none."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from support import random_prompts, stock_generate, tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator, PartlyLoadedError

PROMPT = random_prompts([37])[0]
other_weights = functools.cache(lambda: tiny_model(7).state_dict())


@pytest.fixture
def generator():
    with PagedGenerator(tiny_model()) as generator:
        yield generator


def tokens_of(model, count=12):
    return stock_generate(model, input_ids=torch.tensor([PROMPT]), max_new_tokens=count)[0, len(PROMPT) :].tolist()


def generated(generator, count=12):
    [completion] = generator.generate([PROMPT], max_new_tokens=count)
    return completion


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(generator, before):
    state = generator.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("form", [dict, lambda state: list(state.items()), lambda state: iter(state.items())])
def test_every_form_of_weights_gives_the_other_models_tokens(generator, form):
    addresses = [parameter.data_ptr() for parameter in generator.model.parameters()]
    before = generated(generator)
    addresses = [parameter.data_ptr() for parameter in generator.model.parameters()]
    generator.load_weights(form(other_weights()))
    after = generated(generator)
    assert after.token_ids == tokens_of(tiny_model(7)) != before.token_ids
    assert (after.num_cached_tokens, after.weight_versions) == (0, [1] * 12)
    assert [parameter.data_ptr() for parameter in generator.model.parameters()] == addresses


def test_tensors_of_another_dtype_are_cast(generator):
    generator.load_weights({name: tensor.to(torch.bfloat16) for name, tensor in other_weights().items()})
    for name, tensor in generator.model.state_dict().items():
        assert torch.equal(tensor, other_weights()[name].to(torch.bfloat16).float())


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_requests_that_run_go_on_as_after_an_update(mode):
    made = []
    for load in (lambda g: g.load_weights(iter(other_weights().items())), None):
        with PagedGenerator(tiny_model(), on_weight_change=mode) as generator:
            stream = generator.stream([PROMPT], max_new_tokens=20)
            outputs = [next(stream)[1] for _ in range(6)]
            if load is not None:
                load(generator)
            else:
                with generator.engine.weight_update():
                    generator.model.load_state_dict(other_weights())
            outputs += [output for _, output in stream]
            made.append((outputs[-1].completion.token_ids, outputs[-1].completion.weight_versions))
    assert made[0] == made[1] and made[0][1] == [0] * 6 + [1] * 14


def test_several_calls_inside_of_one_update_are_one_version(generator):
    names = list(other_weights())
    with generator.engine.weight_update():
        generator.load_weights({name: other_weights()[name] for name in names[::2]}, partial=True)
        generator.load_weights({name: other_weights()[name] for name in names[1::2]}, partial=True)
    assert generator.engine.stats().weights_version == 1
    assert generated(generator).token_ids == tokens_of(tiny_model(7))


BAD = [
    (lambda state: state | {"model.norm.wieght": state["model.norm.weight"]}, ValueError, "no tensor of the model"),
    (lambda state: state | {"model.norm.weight": torch.ones(3)}, ValueError, r"has shape \(3,\)"),
    (lambda state: state | {"model.norm.weight": [1.0]}, TypeError, "is a list"),
    (lambda state: {k: v for k, v in state.items() if k != "model.norm.weight"}, ValueError,
     "weights lack 'model.norm.weight': expected"),
    (lambda state: dict(list(state.items())[:3]), ValueError, "and [0-9]+ others: expected every tensor"),
    (lambda state: list(state), TypeError, "expected pairs"),
    (lambda state: 3, TypeError, "expected a dict of tensors or pairs"),
    (lambda state: torch.ones(3), TypeError, "expected a dict of tensors or pairs"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_what_is_wrong_in_a_dict_or_list_changes_nothing(generator, change, error, message):
    before, weights = snapshot(generator.model), change(dict(other_weights()))
    with pytest.raises(error, match=message):
        generator.load_weights(weights)
    assert_unchanged(generator, before)
    assert generator.engine.stats().weights_version == 0
    assert generated(generator).token_ids == tokens_of(tiny_model())


@pytest.mark.parametrize(("change", "error", "message"), BAD[:5])
def test_what_is_wrong_in_an_iterator_says_what_was_written(generator, change, error, message):
    items = list(change(dict(other_weights())).items())
    with pytest.raises(PartlyLoadedError, match=message) as caught:
        generator.load_weights(iter(items))
    assert isinstance(caught.value.__cause__, error)
    written, state = caught.value.written, generator.model.state_dict()
    assert written == tuple(name for name, _ in items[: len(written)])
    old = tiny_model().state_dict()
    for name in other_weights():
        assert torch.equal(state[name], (other_weights() if name in written else old)[name])
    assert generated(generator).weight_versions == [1] * 12
    generator.load_weights(other_weights())
    assert generated(generator).token_ids == tokens_of(tiny_model(7))


@pytest.mark.parametrize("error", [OSError("the trainer is gone"), KeyboardInterrupt()])
def test_an_iterator_that_raises(generator, error):
    def weights():
        yield from list(other_weights().items())[:2]
        raise error

    expected = PartlyLoadedError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        generator.load_weights(weights())
    assert generator.engine.stats().weights_version == 1

    def none():
        raise error
        yield

    with pytest.raises(type(error)):
        generator.load_weights(none())
    generator.load_weights(iter(other_weights().items()))
    assert generated(generator).token_ids == tokens_of(tiny_model(7))


def test_an_iterator_may_not_use_the_engine(generator):
    def weights():
        generator.generate([PROMPT], max_new_tokens=2)
        yield from other_weights().items()

    with pytest.raises(RuntimeError, match=r"inside a weight_update\(\) of the same engine"):
        generator.load_weights(weights())
    with pytest.raises(RuntimeError, match=r"inside a weight_update\(\) of the same engine"):
        generator.load_weights(generator.named_weights())


def test_tied_weights_by_one_name_or_by_both(generator):
    model = tiny_model(tie_word_embeddings=True)
    other = {name: tensor.clone() for name, tensor in tiny_model(7, tie_word_embeddings=True).state_dict().items()}
    with PagedGenerator(model) as tied:
        for left_out in ("lm_head.weight", "model.embed_tokens.weight", None):
            tied.load_weights({name: -tensor for name, tensor in other.items()})
            tied.load_weights({name: tensor for name, tensor in other.items() if name != left_out})
            assert torch.equal(model.lm_head.weight, other["lm_head.weight"])
        before = snapshot(model)
        unlike = other | {"lm_head.weight": -other["lm_head.weight"]}
        with pytest.raises(ValueError, match="shares its memory"):
            tied.load_weights(unlike)
        assert_unchanged(tied, before)
        with pytest.raises(PartlyLoadedError, match="shares its memory"):
            tied.load_weights(iter(unlike.items()))


def test_a_model_with_adapters_has_the_names_of_its_state_dict():
    model = inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], init_lora_weights=False), tiny_model())
    new = {name: torch.randn_like(tensor) * 0.1 for name, tensor in model.state_dict().items()}
    assert any("lora_A" in name for name in new)
    with PagedGenerator(model) as generator:
        with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj.weight' is no tensor"):
            generator.load_weights(other_weights())
        generator.load_weights(new)
        made = generated(generator).token_ids
        assert all(torch.equal(tensor, new[name]) for name, tensor in model.state_dict().items())
    assert made == tokens_of(model)


def test_weights_come_back_by_name_and_as_copies(generator):
    state = generator.model.state_dict()
    found = dict(generator.named_weights())
    assert list(found) == list(state)
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]) and tensor.data_ptr() != state[name].data_ptr()
    generator.load_weights(other_weights())
    generator.load_weights(found)
    assert generated(generator).token_ids == tokens_of(tiny_model())


def test_other_threads_steps_wait_for_the_last_tensor(generator):
    begun, made, steps = threading.Event(), [], []

    def serve():
        for _, output in generator.stream([PROMPT], max_new_tokens=150):
            begun.set()
            made.append(output)

    def weights():
        for item in other_weights().items():
            steps.append(generator.engine._core.totals["steps"])
            time.sleep(0.005)
            yield item

    thread = threading.Thread(target=serve)
    thread.start()
    assert begun.wait(30)
    generator.load_weights(weights())
    thread.join(60)
    assert len(steps) == len(other_weights()) and len(set(steps)) == 1
    versions = made[-1].completion.weight_versions
    assert len(versions) == 150 and set(versions) == {0, 1}


def test_a_closed_generator_has_no_weights_to_load_or_to_give():
    generator = PagedGenerator(tiny_model())
    generator.engine.add_request(PROMPT, GenerationConfig(max_new_tokens=2))
    generator.close()
    with pytest.raises(RuntimeError, match="closed"):
        generator.load_weights(other_weights())
    with pytest.raises(RuntimeError, match="closed"):
        next(generator.named_weights())
