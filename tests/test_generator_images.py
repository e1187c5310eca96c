"""Chats with images of a `PagedGenerator`: stock's tokens, beside text, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import copy
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from image_models import IMAGE
from image_processors import (
    MARKS,
    PLACES,
    data_url,
    image,
    model_of,
    pil,
    processor,
    stock_answer,
    user,
)
from recurrent_models import with_idiom
from support import assert_idle, random_prompts, stock_generate, tiny_model

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.integration.enabled import ENGINES

NEW = {"max_new_tokens": 8}
alone = pytest.mark.parametrize("qwen", ["qwen2.5-vl"], indirect=True)  # others do not have what the test is about
NAMES = [pytest.param(name, marks=with_idiom if name == "qwen3.5" else () if name == "qwen2.5-vl" else pytest.mark.slow)
         for name in PLACES]
TEXT = [{"role": "user", "content": "hello there"}]
ONE = [user("what is ", image(1), "?")]
TWO = [{"role": "system", "content": "be brief"}, user(image(1), " or ", image(2, 16, 24), "?")]
CHATS = [ONE, TEXT, TWO, [user("what is ", image(3), "?")]]
SMALL_STEPS = {"max_num_batched_tokens": 21, "max_num_seqs": 4}


@pytest.fixture(params=NAMES)
def made(request):
    found = processor(request.param)
    return model_of(found, request.param), found


@pytest.fixture(params=["qwen2.5-vl", pytest.param("qwen3.5", marks=[pytest.mark.slow, with_idiom])])
def qwen(request):
    found = processor(request.param)
    return model_of(found, request.param), found


def answers(model, made, chats, **settings) -> list[tuple[list[int], list[int]]]:
    return [stock_answer(model, made, chat, **{**NEW, **settings}) for chat in chats]


def found_in(completions) -> list[tuple[list[int], list[int]]]:
    return [(one.prompt_token_ids, one.token_ids) for one in completions]


def test_each_chat_equals_stocks(made):
    """In one call, in small chunks; the second time from the prefix cache."""
    expected = answers(*made, CHATS)
    assert expected[0][0] == expected[3][0] and expected[0][1] != expected[3][1]
    given = copy.deepcopy(CHATS)
    with PagedGenerator(*made, **SMALL_STEPS) as generator:
        for _ in range(2):
            completions = generator.generate(given, **NEW)
            assert found_in(completions) == expected
            assert [one.text for one in completions] == [
                made[1].decode(tokens, skip_special_tokens=True) for _, tokens in expected]
            assert [one.has_images for one in completions] == [True, False, True, True]
        assert given[0][0]["content"][1].keys() == {"type", "image"}  # as they were given
        assert generator.engine.stats().prefix_cache_hits > 0
        assert_idle(generator.model)


def test_equal_images_of_requests_run_through_the_tower_once(qwen):
    expected = answers(*qwen, CHATS)
    with PagedGenerator(*qwen) as generator:
        for _ in range(2):
            assert found_in(generator.generate(CHATS, **NEW)) == expected
        stats = generator.engine.stats()
        with torch.no_grad():
            generator.model.model.visual.patch_embed.proj.weight.mul_(1.5)
        assert found_in(generator.generate(CHATS, **NEW)) == answers(generator.model, qwen[1], CHATS) != expected
        encoded = generator.engine.stats().num_images_encoded
    # Of four images three are unlike; the first comparison of a kind encodes two more.
    assert stats.num_images_encoded + stats.num_images_reused >= 8 and stats.num_images_encoded <= 3 + 2 * 2
    assert encoded >= stats.num_images_encoded + 3


def test_all_forms_of_an_image(qwen, tmp_path):
    picture = image(1)
    path = tmp_path / "picture.png"
    picture.save(path)
    [expected] = answers(*qwen, [ONE])
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": picture}, {"type": "image", "image": np.array(picture)},
        {"type": "image", "image": str(path)}, {"type": "image", "path": str(path)},
        {"type": "image", "image": data_url(picture)}, {"type": "image", "url": data_url(picture)},
        {"type": "image_url", "image_url": {"url": data_url(picture)}},
        {"type": "image_url", "image_url": data_url(picture)}]
    with PagedGenerator(*qwen) as generator:
        chats: list[Any] = [[user("what is ", part, "?")] for part in parts]
        chats.append([{"role": "user", "content": tuple(chats[-1][0]["content"])}])
        assert found_in(generator.generate(chats, **NEW)) == [expected] * len(chats)
        assert found_in(generator.generate(ONE, **NEW)) == [expected]


def test_every_entry(qwen):
    expected = answers(*qwen, CHATS)

    async def awaited(generator):
        whole = await generator.agenerate(CHATS, **NEW)
        last = {index: output async for index, output in generator.astream(CHATS, **NEW)}
        return found_in(whole), found_in(last[index].completion for index in range(len(CHATS)))

    with PagedGenerator(*qwen) as generator:
        pieces: dict[int, list[int]] = {}
        for index, output in generator.stream(CHATS, **NEW):
            pieces.setdefault(index, []).extend(output.new_token_ids)
        assert [pieces[index] for index in range(len(CHATS))] == [tokens for _, tokens in expected]
        assert asyncio.run(awaited(generator)) == (expected, expected)
        drawn = generator.generate(ONE, **NEW, do_sample=True, top_k=1, num_return_sequences=3)
        assert found_in(drawn) == [expected[0]] * 3
        assert generator.warm_up([ONE], **NEW) is not None


def test_log_probabilities_of_prompt_and_output(qwen):
    model, made = qwen
    inputs = made.apply_chat_template(copy.deepcopy(TWO), tokenize=True, return_dict=True, return_tensors="pt",
                                      add_generation_prompt=True)
    with torch.no_grad():
        scores = copy.deepcopy(model)(**inputs).logits[0].log_softmax(-1)
    ids = inputs["input_ids"][0]
    expected = scores[:-1].gather(1, ids[1:, None])[:, 0]
    with PagedGenerator(*qwen) as generator:
        [one] = generator.generate(TWO, max_new_tokens=1, prompt_logprobs=True, logprobs="raw")
    assert np.allclose(one.prompt_logprobs[1:], expected, atol=1e-4)
    assert np.allclose(one.logprobs, scores[-1].max(), atol=1e-4)


def test_a_second_turn_hits_the_first(qwen):
    with PagedGenerator(*qwen, block_size=16) as generator:
        [first] = generator.generate(TWO, max_new_tokens=20)
        second = [*TWO, {"role": "assistant", "content": first.text}, user("and ", image(3), "?")]
        [expected] = answers(*qwen, [second])
        [completion] = generator.generate(second, **NEW)
        assert found_in([completion]) == [expected] and completion.num_cached_tokens >= 32
        other = [*second[:1], user(image(4), " or ", image(2, 16, 24), "?"), *second[2:]]
        assert found_in(generator.generate(other, **NEW)) == answers(*qwen, [other])


def test_keywords_of_the_processors_template(qwen):
    """The chat template, and its variables, are the processor's; a last message is continued."""
    model, made = qwen
    made.chat_template = made.chat_template.replace("assistant: ", "{{ prefix }}: ")
    made.tokenizer.chat_template = None
    begun = [*TWO, {"role": "assistant", "content": [{"type": "text", "text": "it is"}]}]
    with PagedGenerator(*qwen) as generator:
        [one] = generator.generate(ONE, chat_template_kwargs={"prefix": "me"}, **NEW)
        assert found_in([one]) == [stock_answer(model, made, ONE, {"prefix": "me"}, **NEW)]
        [one] = generator.generate(begun, continue_final_message=True, **NEW)
        continued = {"continue_final_message": True, "add_generation_prompt": False}
        assert found_in([one]) == [stock_answer(model, made, begun, continued, **NEW)]
        for unread in ({"enable_thinking": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
            with pytest.raises(ValueError, match=f"{next(iter(unread))}=.*the model's chat template does not"):
                generator.generate(ONE, chat_template_kwargs=unread, **NEW)


@alone
def test_settings_of_the_models_config_and_of_the_processor(qwen):
    """Those of a call are not part of how its images are prepared, whatever they are."""
    model, made = qwen
    model.generation_config.update(num_beams=2, prompt_lookup_num_tokens=3, repetition_penalty=1.3, max_length=400)
    with PagedGenerator(*qwen) as generator:
        [one] = generator.generate(ONE, num_beams=1, **NEW)
        assert found_in([one]) == answers(*qwen, [ONE], num_beams=1)
        model.generation_config.num_beams = 1
        bigger = {"processor_kwargs": {"images_kwargs": {"size": {"shortest_edge": 1024, "longest_edge": 1024}}}}
        [one] = generator.generate(ONE, chat_template_kwargs=bigger, **NEW)
        assert found_in([one]) == [stock_answer(model, made, ONE, bigger, **NEW)] != answers(*qwen, [ONE])


def test_a_limit_of_new_tokens_that_no_model_has():
    """An answer ends where the model does, as behind text."""
    made = processor("qwen2.5-vl")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    model = model_of(made, "qwen2.5-vl", rope_parameters=rope, max_position_embeddings=64)
    with PagedGenerator(model, made) as generator:
        with pytest.warns(UserWarning, match="max_model_len=64"):
            made = generator.generate([ONE, TEXT], max_new_tokens=10**6)
        assert [(one.finish_reason, len(one.prompt_token_ids) + len(one.token_ids)) for one in made] == [
            ("length", 64)] * 2


def test_an_image_that_is_aborted_beside_others(qwen):
    """Text requests of another thread and images share the engine's steps."""
    texts = random_prompts([30, 9])
    with PagedGenerator(*qwen, **SMALL_STEPS) as generator:
        expected = [generator.generate(prompt, max_new_tokens=40)[0].token_ids for prompt in texts]
        stock = answers(*qwen, [TWO], max_new_tokens=12)
        found: list[Any] = []
        beside = threading.Thread(target=lambda: found.extend(generator.generate(texts, max_new_tokens=40)))
        beside.start()
        ended = {}
        for index, output in generator.stream([ONE, TWO], request_ids=["one", "two"], max_new_tokens=12):
            if index == 0 and output.completion is None:
                generator.cancel("one")
            if output.completion is not None:
                ended[index] = output.completion
        beside.join(60)
        assert ended[0].finish_reason == "abort" and len(ended[0].token_ids) < 12 and ended[0].has_images
        assert found_in([ended[1]]) == stock
        assert [one.token_ids for one in found] == expected
        assert_idle(generator.model)


def test_weights_of_the_tower_that_change(qwen):
    model, _ = qwen
    with PagedGenerator(*qwen) as generator:
        before = found_in(generator.generate(ONE, **NEW))
        with torch.no_grad():
            for weight in model.model.visual.parameters():
                weight.mul_(1.2)
        after = found_in(generator.generate(ONE, **NEW))
        assert after == answers(*qwen, [ONE]) != before


def test_weights_that_change_while_an_image_runs(qwen):
    """What was fed is fed again."""
    model, made = qwen
    with PagedGenerator(*qwen) as generator:
        outputs = []
        for _, output in generator.stream([TWO], max_new_tokens=12):
            outputs.append(output)
            if len(outputs) == 4:
                with generator.engine.weight_update(), torch.no_grad():
                    for name, weight in model.named_parameters():
                        if "language_model" in name and "proj" in name:
                            weight.mul_(0.8)
        tokens, versions = outputs[-1].completion.token_ids, outputs[-1].completion.weight_versions
    before = versions.count(versions[0])
    inputs = made.apply_chat_template(copy.deepcopy(TWO), tokenize=True, return_dict=True, return_tensors="pt",
                                      add_generation_prompt=True)
    for name, further in (("input_ids", torch.tensor(tokens[:before])), ("attention_mask", torch.ones(before)),
                          ("mm_token_type_ids", torch.zeros(before))):
        inputs[name] = torch.cat([inputs[name], further[None].to(inputs[name].dtype)], 1)
    expected = stock_generate(model, **inputs, max_new_tokens=12 - before)[0, -(12 - before):].tolist()
    assert 0 < before < 12 and tokens[before:] == expected


@alone
@pytest.mark.parametrize("layers", [r".*language_model.*\.(q_proj|v_proj)", r".*\.(q_proj|qkv)"],
                         ids=["decoder", "and tower"])
def test_adapters_by_prompt(qwen, any_peft, layers):
    """That of the tower is the active one, since PEFT takes none by image."""
    peft = pytest.importorskip("peft")
    model, made = qwen
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False), "one")
    stock = copy.deepcopy(model)
    expected = answers(stock, made, [ONE])
    stock.disable_adapters()
    plain = answers(stock, made, [ONE])
    assert expected != plain
    with PagedGenerator(*qwen) as generator:
        assert found_in(generator.generate(ONE, **NEW)) == expected
        named = generator.generate([ONE, ONE], adapter_names=["one", "__base__"], on_error="complete", **NEW)
        if "qkv" not in layers:
            assert found_in(named) == expected + plain
        else:
            assert found_in(named[:1]) == expected
            assert "images under the adapter '__base__', which is not the active one of model.visual" in named[1].error


def test_pixels_of_one_prompt_are_held_at_a_time(qwen, monkeypatch):
    """Of a batch of any size; what the model is fed lies on the host until a step takes it."""
    _, made = qwen
    apply, held, most = made.apply_chat_template, [], []

    def counted(*args, **keywords):
        most.append(sum(pixels() is not None for pixels in held))
        result = apply(*args, **keywords)
        held.append(weakref.ref(result["pixel_values"]))
        return result

    chats = [[user("what is ", image(number), "?")] for number in range(5)]
    expected = answers(*qwen, chats)
    monkeypatch.setattr(made, "apply_chat_template", counted)
    with PagedGenerator(*qwen) as generator:
        assert found_in(generator.generate(chats, **NEW)) == expected
    assert len(most) == 5 and max(most) <= 1


def test_nothing_is_set_on_the_model(qwen):
    """Nor is the view of it that stock's `generate` prepares enabled by `install`."""
    model, _ = qwen
    hf_paged.install()
    try:
        with PagedGenerator(*qwen) as generator:
            before = {name: dict(vars(module)) for name, module in model.named_modules()}
            config, known = model.generation_config.to_dict(), {id(one) for one in ENGINES}  # some of earlier tests
            generator.generate(ONE, **NEW)
            assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
            assert model.generation_config.to_dict() == config
            assert id(model) in known and {id(one) for one in ENGINES} <= known
    finally:
        hf_paged.uninstall()


# -- what is refused --------------------------------------------------------------------------------------------------


def truncated() -> str:
    whole = base64.b64decode(data_url(image(1, 64, 64)).partition(",")[2])
    return data_url(whole[:2000])


def hostile() -> dict[str, tuple[Any, str]]:
    """Chats by what is wrong with them, with a pattern of the message."""
    return {
        "truncated": ([user("a ", {"type": "image", "url": truncated()})], "truncated"),
        "no image": ([user("a ", {"type": "image", "url": data_url(b"hello")})], "image"),
        "no such file": ([user("a ", {"type": "image", "path": "/no/such/file.png"})], "file.png"),
        "long": ([user("a ", {"type": "image", "url": "data:image/png;base64," + "A" * 10**6})], "image"),
        "no pixels": ([user("a ", {"type": "image"})], "image"),
        "placeholder": ([user("a ", MARKS[IMAGE], image(1))], "number of|StopIteration"),
        "placeholder alone": ([user("a ", MARKS[IMAGE])], "<image>|image_pad"),
        "no object": ([user("a ", {"type": "image", "image": 5})], "'int'"),
        "a video": ([user("a ", {"type": "video", "video": "x.mp4"})], "'video', expected text parts.* and images"),
        "thin": ([user("a ", image(1, 1000, 1))], "ratio"),
        "big": ([user("a ", image(1, 100, 100))], "decompression bomb"),
    }


@pytest.mark.parametrize("kind", hostile())
def test_a_bad_chat_ends_alone(qwen, kind, monkeypatch):
    chat, pattern = hostile()[kind]
    if kind == "big":
        chat = [user("a ", {"type": "image", "url": data_url(image(1, 100, 100))})]
        monkeypatch.setattr(pil, "MAX_IMAGE_PIXELS", 4000)
    expected = answers(*qwen, [ONE, TEXT])
    accepted = []
    if kind in ("no pixels", "placeholder alone"):  # which transformers 5.17 takes for text
        with suppress(ValueError):
            accepted = answers(*qwen, [chat])
    with PagedGenerator(*qwen) as generator:
        one, bad, text = generator.generate([ONE, chat, TEXT], on_error="complete", **NEW)
        assert found_in([one, text]) == expected
        if accepted:
            assert found_in([bad]) == accepted
            return
        assert bad.finish_reason == "error" and len(bad.error) < 1100
        with pytest.raises((ValueError, TypeError), match=rf"prompts\[1\]: .*{pattern}"):
            generator.generate([ONE, chat, TEXT], **NEW)
        assert_idle(generator.model)


def test_what_the_models_own_code_refuses():
    """A processor of another model, with fewer placeholders than the tower has vectors."""
    made = processor("gemma3")
    model = model_of(made, "gemma3")
    expected = answers(model, made, [TEXT])
    other = type(made)(made.image_processor, made.tokenizer, chat_template=made.chat_template, image_seq_length=12)
    with PagedGenerator(model, other) as generator:
        bad, text = generator.generate([ONE, TEXT], on_error="complete", **NEW)
        assert found_in([text]) == expected
        assert bad.finish_reason == "error" and "its images cannot run: " in bad.error


def test_images_that_are_too_long(qwen):
    with PagedGenerator(*qwen, max_model_len=32) as generator:
        bad, text = generator.generate([TWO, TEXT], on_error="complete", max_new_tokens=4)
        assert "max_model_len" in bad.error and len(text.token_ids) == 4


def test_images_without_a_processor_and_without_a_tower(qwen):
    model, made = qwen
    with PagedGenerator(model, made.tokenizer) as generator:
        assert generator.processor is None
        with pytest.raises(ValueError, match=r"type 'image', expected text parts.*AutoProcessor"):
            generator.generate(ONE, chat_template=made.chat_template, **NEW)
        expected = answers(*qwen, [ONE, TEXT])
        generator.tokenizer = made  # from now on
        assert generator.processor is made and generator.tokenizer is made.tokenizer
        assert found_in(generator.generate([ONE, TEXT], **NEW)) == expected
        generator.tokenizer = made.tokenizer
        assert generator.processor is None
    with PagedGenerator(tiny_model(vocab_size=300), made) as generator:
        with pytest.raises(hf_paged.UnsupportedOptionError, match=r"prompts\[0\]: images of a Qwen3ForCausalLM"):
            generator.generate(ONE, **NEW)
        assert len(generator.generate(TEXT, **NEW)[0].token_ids) == 8


def test_processors_of_checkpoints(tmp_path):
    """One that cannot be loaded, here for lack of torchvision, leaves the tokenizer for text."""
    made = processor("llava")
    model = model_of(made, "llava")
    model.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    expected = answers(model, made, [ONE, TEXT])
    with PagedGenerator.from_pretrained(tmp_path, device="cpu") as generator:
        assert type(generator.processor) is type(made) and generator.tokenizer.padding_side == "left"
        assert found_in(generator.generate([ONE, TEXT], **NEW)) == expected
    made.tokenizer.chat_template, made.chat_template = made.chat_template, None
    made.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    made.tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    with PagedGenerator.from_pretrained(tmp_path, device="cpu") as generator:
        assert found_in(generator.generate([ONE, TEXT], **NEW)) == expected
    file = tmp_path / "processor_config.json"
    file.write_text(file.read_text().replace("LlavaProcessor", "NoSuchProcessor"))
    with PagedGenerator.from_pretrained(tmp_path, device="cpu") as generator:
        assert generator.processor is None
        assert found_in(generator.generate(TEXT, **NEW)) == expected[1:]


def test_a_completion_of_images_is_not_continued(qwen):
    """Its token ids are not its prompt."""
    with PagedGenerator(*qwen) as generator:
        one, text = generator.generate([ONE, TEXT], max_new_tokens=4)
        again, more = generator.generate([one, text], on_error="complete", **NEW)
        assert "a Completion of a prompt with images" in again.error
        assert found_in([more]) == answers(*qwen, [TEXT])
        with pytest.raises(ValueError, match="a Completion of a prompt with images"):
            generator.engine.add_request(one)
