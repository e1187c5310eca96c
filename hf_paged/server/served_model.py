"""The model of a server: its names, its engine and the threads that generate."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor

from hf_paged.config import PagedConfig
from hf_paged.engine.driver import EngineThread
from hf_paged.engine.engine import Engine
from hf_paged.errors import FallbackWarning, UnsupportedModelError
from hf_paged.integration.adapters import adapter_names, load_adapter
from hf_paged.integration.async_calls import AsyncSink, EventLoops
from hf_paged.integration.enable import disable, enable_with_engine, get_engine, unsupported_class
from hf_paged.options.processors import with_template
from hf_paged.options.request_spec import RequestSpec
from hf_paged.parallel.checkpoint import check_place
from hf_paged.server.errors import EngineDeadError, refusal
from hf_paged.server.images import ImageLimits

logger = logging.getLogger(__name__)

_PARTING_S = 2.0  # seconds that `close` waits for a step


class ServedModel:
    """A model with its processor, its engine and the threads that generate.

    A model that hf_paged does not support has no engine: its requests run by `model.generate`, one after the other.

    Args:
        processor: the model's processor or tokenizer.
        names: the names by which requests name the model; the first is that of answers.
        config: the settings of the engine; with ``strict`` a model that is not supported raises UnsupportedModelError.
        template_keywords: keywords of the chat template for each chat, which those of a body override.
        image_limits: of each request.

    Attributes:
        why_not_ready: why requests would wait long now, or None.
        stock: the thread in which `model.generate` runs.
        reader: the thread that reads prompts, whose length must not stop the event loop; only one, since a call with
            truncation changes the tokenizer while it runs.
        towers: the thread in which images run through the model's tower; only one, since a tower may take much memory.
    """

    def __init__(self, model: Any, processor: Any, names: list[str], config: PagedConfig | None = None,
                 template_keywords: Mapping[str, Any] | None = None,
                 image_limits: ImageLimits | None = None) -> None:
        self.model, self.processor, self.names = model, processor, names
        self.image_limits = image_limits or ImageLimits()
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.template_keywords = dict(template_keywords or {})
        self._created = int(time.time())
        self.why_not_ready: str | None = None
        self.engine: Engine | None = None
        config = config or PagedConfig()
        self.seed = config.seed  # of requests without one
        if (reason := unsupported_class(model)) is None:
            self.engine = enable_with_engine(model, config, tokenizer=self.tokenizer)
        elif config.strict:
            raise UnsupportedModelError(reason.with_remedy)
        else:
            warnings.warn(f"hf_paged: {reason.with_remedy} Requests run by model.generate, one after the other.",
                          FallbackWarning, stacklevel=2)
        self._loops = EventLoops()
        self._calls: set[AsyncSink] = set()
        self.thread = EngineThread(lambda: get_engine(model), after_turn=self._loops.deliver, on_end=self._end)
        if self.engine is not None:
            self.thread.start()
        self.stock = ThreadPoolExecutor(1, "hf_paged stock generate")
        self.reader = ThreadPoolExecutor(1, "hf_paged prompts")
        self.towers = ThreadPoolExecutor(1, "hf_paged images")

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        return self.engine is None or not self.thread.is_over

    def warm_up(self) -> None:
        """Warm the engine up in a thread, if the config wants that. A failure is logged, and the server answers."""
        if self.engine is None or not self.engine.needs_warm_up:
            return
        self.why_not_ready = "the engine compiles kernels"

        def run(engine: Engine) -> None:
            try:
                engine.warm_up([[0] * 8])
            except Exception as error:
                logger.warning("hf_paged: the warm-up failed, and the first requests will wait longer: %r", error)
            finally:
                self.why_not_ready = None

        threading.Thread(target=run, args=(self.engine,), daemon=True, name="hf_paged warm-up").start()

    @property
    def modalities(self) -> frozenset[str]:
        """What the processor reads besides text: "image", "audio"."""
        found = {"image"} if hasattr(self.processor, "image_processor") and self.image_limits.images else set()
        return frozenset(found | ({"audio"} if hasattr(self.processor, "feature_extractor") else set()))

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a body's `model` names, or None for the model itself.

        Raises:
            RefusedRequestError: the server has no model of this name.
        """
        if name is None or name in self.names:
            return None
        if name not in (adapters := adapter_names(self.model)):
            raise refusal("model", name, f"expected a name of this server: {', '.join([*self.names, *adapters])}")
        return name

    def listed(self) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`: the model by each of its names, and its adapters."""
        head = {"object": "model", "created": self._created, "owned_by": "hf_paged"}
        return [*({"id": name, **head} for name in self.names),
                *({"id": name, **head, "parent": self.names[0]} for name in adapter_names(self.model))]

    def new_call(self, *, stream: bool) -> AsyncSink:
        """Return a call of the engine's thread, whose outputs come on the running event loop."""
        return AsyncSink(self.thread, self._loops, stream=stream)

    async def begin(self, call: AsyncSink, requests: list[RequestSpec]) -> list[str | ValueError]:
        """Queue the requests of a call, as `AsyncSink.begin`; `end` has to be called afterwards.

        Raises:
            EngineDeadError: the engine's thread has ended.
        """
        self._calls.add(call)  # first, so that a thread that ends now fails the call
        if self.thread.is_over:
            raise EngineDeadError(f"the thread that generates has ended: {self.thread.fatal_error!r}")
        return await call.begin(requests)

    def end(self, call: AsyncSink) -> None:
        """End the unfinished requests of a call."""
        self._calls.discard(call)
        call.close()

    def _end(self, error: BaseException | None) -> None:
        """Fail calls whose requests the thread has not begun when it ends."""
        for call in list(self._calls):
            call.fail(error)
        self._loops.deliver()

    def close(self) -> None:
        """End the threads, and disable the model."""
        self.stock.shutdown(wait=False, cancel_futures=True)
        self.reader.shutdown(wait=False, cancel_futures=True)
        self.towers.shutdown(wait=False, cancel_futures=True)
        if self.engine is not None:
            self.thread.stop(now=True)
            self.thread.join(_PARTING_S)
            disable(self.model)


def load_model(place: str, *, device: str = "auto", dtype: str = "auto", attn_implementation: str | None = None,
               quantization: str | None = None, trust_remote_code: bool = False,
               adapters: dict[str, str] | None = None) -> tuple[Any, Any]:
    """Load a model, and its processor (of a model of texts: its tokenizer).

    Args:
        place: a folder, an id of the hub, maybe with ``@REVISION``, or one of them with ``:FILE.gguf``.
        device: a device, a device map of transformers, or "auto" for the GPU where there is one.
        quantization: "bnb-4bit", "bnb-8bit" or None.
        adapters: paths by name of LoRA adapters to load, none of them active.

    Raises:
        OSError: there is no such folder.
    """
    name, _, file = place.rpartition(":")
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if file.endswith(".gguf") and name:
        place, arguments["gguf_file"] = name, file
    check_place("MODEL", place)
    if not os.path.exists(place) and "@" in place:
        place, _, arguments["revision"] = place.partition("@")
    processor = with_template(AutoProcessor.from_pretrained(place, **arguments))
    config = AutoConfig.from_pretrained(place, **arguments)
    kind = getattr(transformers, (config.architectures or ["none"])[0], AutoModelForCausalLM)
    if quantization is not None:
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        arguments["quantization_config"] = transformers.BitsAndBytesConfig(
            **bits if quantization == "bnb-4bit" else {"load_in_8bit": True})
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = kind.from_pretrained(place, dtype=dtype, device_map=device, **arguments).eval()
    for name, path in (adapters or {}).items():
        load_adapter(model, name, path)
    return model, processor
