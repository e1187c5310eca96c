"""Warnings of calls that go to stock: once a reason, at the user's line, with the remedy, without tensors' data."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from support import batch, random_prompts, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig, pipeline

import hf_paged
from hf_paged.errors import Reason
from hf_paged.integration.fallback import unreadable, value_reason
from hf_paged.parallel.group import SINGLE, ParallelGroup

INPUTS = batch([9, 4])


def caught_by(*calls):
    """The FallbackWarnings of these calls, made one after the other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [w for w in caught if issubclass(w.category, hf_paged.FallbackWarning)]


def test_once_a_reason_whatever_the_value():
    model = hf_paged.enable(tiny_model())
    warned = caught_by(*(
        lambda options=options: model.generate(**INPUTS, max_new_tokens=2, **options)
        for options in ({"prefill_chunk_size": 4}, {"prefill_chunk_size": 3}, {"position_ids": torch.ones(2, 9).long()},
                        {"prefill_chunk_size": 4}, {"position_ids": torch.zeros(2, 9).long()})
    ))
    assert [re.search(r"prefill_chunk_size=4|position_ids", str(w.message)).group() for w in warned] == [
        "prefill_chunk_size=4", "position_ids"
    ]


def test_once_a_model():
    models = [hf_paged.enable(tiny_model(seed)) for seed in (0, 1)]
    calls = [lambda model=model: model.generate(**INPUTS, max_new_tokens=2, prefill_chunk_size=4) for model in models]
    assert len(caught_by(*calls, *calls)) == 2


def test_as_an_error_it_comes_every_time():
    model = hf_paged.enable(tiny_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_paged.FallbackWarning)
        for _ in range(2):
            with pytest.raises(hf_paged.FallbackWarning, match="prefill_chunk_size"):
                model.generate(**INPUTS, max_new_tokens=2, prefill_chunk_size=4)
    assert hf_paged.get_engine(model).stats().calls["stock"].num_calls == 0


def _through_peft(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval().generate


def _through_a_decorator(model):
    return torch.inference_mode()(model.generate)


@pytest.mark.parametrize("through", [lambda model: model.generate, _through_peft, _through_a_decorator])
@pytest.mark.parametrize("options", [
    {"prefill_chunk_size": 4}, {"num_beams": 2, "output_attentions": True, "return_dict_in_generate": True},
    {"custom_generate": lambda model, input_ids, **kwargs: input_ids},
], ids=lambda options: next(iter(options)))
def test_it_points_at_the_line_that_called(through, options):
    generate = through(hf_paged.enable(tiny_model()))
    [warned] = caught_by(lambda: generate(**INPUTS, max_new_tokens=2, **options))
    assert warned.filename == __file__
    with open(__file__) as lines:
        assert "[warned] = caught_by(lambda: generate(" in lines.readlines()[warned.lineno - 1]


def test_it_points_at_the_line_that_called_a_pipeline(trained_model, trained_tokenizer):
    hf_paged.enable(trained_model)
    generator = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)
    [warned] = caught_by(lambda: generator("amber-fox", max_new_tokens=2, prefill_chunk_size=4))
    assert warned.filename == __file__


def test_it_points_at_the_line_that_called_generate_batch():
    model = hf_paged.enable(tiny_model())
    small = ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=64, use_cuda_graph=False)
    config = GenerationConfig(max_new_tokens=2, num_beams=2)
    [warned] = caught_by(lambda: model.generate_batch(random_prompts([5]), config, small, warmup=False))
    assert warned.filename == __file__


VALUES = torch.tensor([[0.123456, 7.654321]])


@pytest.mark.parametrize("options", [
    {"inputs_embeds": torch.full((2, 9, 64), 0.123456)},
    {"past_key_values": VALUES},
    {"watermarking_config": VALUES, "prefill_chunk_size": VALUES},
    {"a_new_option": VALUES},
], ids=lambda options: next(iter(options)))
def test_no_data_of_tensors(options):
    model = hf_paged.enable(tiny_model())
    texts = [str(reason) for reason in _explained(model, options)]
    for text in texts:
        assert "0.123" not in text and "7.654" not in text and "tensor(" not in text, text


def _explained(model, options):
    """Reasons by explain, or by the options' own check where stock's preparation refuses them."""
    from hf_paged.options.settings import options_beyond_tokens

    config = copy.deepcopy(model.generation_config)
    for name, value in options.items():
        setattr(config, name, value)
    yield from options_beyond_tokens(config)
    try:
        yield from hf_paged.explain(model, **INPUTS, **options).reasons
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return


def test_errors_that_become_reasons_lose_the_data_of_tensors():
    error = ValueError(f"eos_token_id={VALUES!r}: expected an integer, not {VALUES[0].requires_grad_()!r}")
    for reason in (value_reason(error), unreadable(of_group(SINGLE), error)):
        assert "eos_token_id=a tensor: expected an integer, not a tensor" in reason
        assert "0.12" not in reason and "7.65" not in reason


def test_ranks_do_not_part_over_memory():
    """Which one rank alone may lack for images."""
    error = torch.OutOfMemoryError("not enough")
    with pytest.raises(torch.OutOfMemoryError, match="not enough"):
        unreadable(of_group(ParallelGroup(1, 2)), error)
    assert "not enough" in unreadable(of_group(SINGLE), error)
    assert "of all" in unreadable(of_group(ParallelGroup(1, 2)), ValueError("of all"))


def of_group(group):
    """What the reason depends on of an engine."""
    return SimpleNamespace(group=group)


def test_the_warning_names_the_remedy():
    model = hf_paged.enable(tiny_model())
    model.lm_head.register_forward_hook(lambda *args: None)
    [warned] = caught_by(lambda: model.generate(**INPUTS, max_new_tokens=2))
    assert str(warned.message).endswith("lm_head has a forward hook. Remove the hook, or leave it: stock runs it.")


def test_a_reason_is_its_text_and_survives_copies():
    reason = Reason("option={} of {}", 3, "four", remedy="Leave it out.")
    assert (reason, reason.kind, reason.remedy) == ("option=3 of four", "option=… of …", "Leave it out.")
    for twin in (copy.copy(reason), copy.deepcopy(reason), pickle.loads(pickle.dumps(reason))):
        assert (twin, twin.kind, twin.remedy) == (reason, reason.kind, reason.remedy)
    with pytest.raises(TypeError, match="remedy"):
        Reason("option=3")  # type: ignore[call-arg]
