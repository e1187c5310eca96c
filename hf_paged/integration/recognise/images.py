"""Images of a prompt that comes from a processor, as the model's own code feeds them to its decoder."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason, UnsupportedOptionError
from hf_paged.integration import paths
from hf_paged.integration.fallback import IN_FALLBACK
from hf_paged.integration.paths import within
from hf_paged.integration.recognise.inputs import DecodingInputs, argument_reasons, has_images, paged_rows
from hf_paged.models.images.fed_prompt import FedPrompt
from hf_paged.options.request_spec import RequestSpec

_OF_LOOP = ("next_sequence_length", "is_first_iteration")  # which stock's loop adds for `prepare_inputs_for_generation`


class _PreparedError(Exception):
    """Ends stock's `generate` in front of its first forward."""

    def __init__(self, model_kwargs: dict[str, Any]) -> None:
        self.model_kwargs = model_kwargs


def on_device(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor made on the model's device, numbers in the model's dtype, as in transformers' pipelines.
    """
    return {name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def fed_prompts(engine: Engine, inputs: DecodingInputs, prompts: list[list[int]],
                max_new_tokens: int) -> list[FedPrompt | None] | Reason:
    """Return what the model is fed of each row of a call besides its ids (None: nothing), or why the engine cannot.

    Args:
        prompts: The rows without their padding.
    """
    if not has_images(inputs.model_kwargs):
        return [None] * len(prompts)
    if inputs.generation_config.use_cache is False:
        return Reason("use_cache=False with images, which stock hands in again for each token",
                      remedy="Leave the option out.")
    return engine.recorded_images(inputs.input_ids, list(map(len, prompts)), inputs.model_kwargs, max_new_tokens,
                                  once=paths.asked() is None)


def with_images(engine: Engine, spec: RequestSpec, inputs: Mapping[str, Any],
                blaming: AbstractContextManager[None]) -> RequestSpec:
    """Return a request with what the model is fed of its prompt besides its ids, which have placeholders of images.

    The images run through the tower, in this thread.

    Args:
        inputs: `Prompt.inputs`.
        blaming: Turns what the model's own code raises about the images into an error of the request.

    Raises:
        UnsupportedOptionError: The engine does not run them.
    """
    with blaming:
        fed = _fed_prompt(engine, spec.prompt, inputs, spec.max_new_tokens, spec.adapter_name)
    if isinstance(fed, Reason):
        raise UnsupportedOptionError(fed.with_remedy)
    return spec if fed is None else spec.but(fed=fed)


@torch.no_grad()
def _fed_prompt(engine: Engine, ids: list[int], inputs: Mapping[str, Any], max_new_tokens: int,
                adapter: str | None) -> FedPrompt | Reason | None:
    given = dict(inputs)
    if (reason := next(argument_reasons(given), None)) is not None:
        return reason
    if not has_images(given):
        return None
    if (reason := engine.images_reason(adapter)) is not None:
        return reason
    model = engine.model
    input_ids: Any = torch.tensor([ids], dtype=torch.int64, device=model.device)
    prepared = _prepared(engine, input_ids, on_device(model, given))
    call = DecodingInputs(
        input_ids, LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig(), False, prepared)
    rows = paged_rows(engine, call)
    if isinstance(rows, Reason):
        return rows
    most_new = min(max_new_tokens, engine.max_model_len - len(ids))
    found = fed_prompts(engine, call, [ids], most_new)
    if isinstance(found, Reason):
        return found
    return None if found[0] is None else found[0].on_host()


def _prepared(engine: Engine, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what stock's `generate` gives the first forward of a call, prepared over a view of the model."""
    model, config = engine.model, GenerationConfig(max_new_tokens=1, do_sample=False)
    view = engine.view_for_images()

    @functools.wraps(view.prepare_inputs_for_generation)  # `generate` reads the signature
    def ends(*_: Any, **model_kwargs: Any) -> NoReturn:
        raise _PreparedError({name: value for name, value in model_kwargs.items() if name not in _OF_LOOP})

    vars(view).update(generation_config=GenerationConfig(), prepare_inputs_for_generation=ends)
    try:
        with within(IN_FALLBACK, (*IN_FALLBACK.get(), engine)):  # `install` leaves the view alone
            view.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, **inputs)
    except _PreparedError as end:
        return end.model_kwargs
    raise LookupError(f"generate of {type(model).__name__} does not prepare a forward")
