"""Batch generation around a model: prompts in, completions out."""

from __future__ import annotations

import os
import reprlib
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from typing_extensions import Unpack

from hf_paged.config import PagedConfig, require_int
from hf_paged.engine.driver import EngineThread
from hf_paged.engine.engine import Engine
from hf_paged.engine.follower import load_on_ranks
from hf_paged.engine.session import Session
from hf_paged.errors import EngineClosedError
from hf_paged.integration import paths
from hf_paged.integration.adapters import each_under
from hf_paged.integration.async_calls import AsyncCalls
from hf_paged.integration.enable import disable, enable_with_engine, get_engine, is_enabled, merged_config, unwrap
from hf_paged.integration.paths import CALL_SALT, CALL_SEED, within
from hf_paged.integration.pretrained import check_checkpoint, load_whole, split_arguments, tokenizer_of
from hf_paged.integration.requests import (
    Call,
    CallReader,
    best_outputs,
    numbered,
    one_per_prompt,
    runnable,
)
from hf_paged.observe.progress import Progress
from hf_paged.observe.registry import metrics_of
from hf_paged.options.arguments import base_seed, merge_config, salt_digest
from hf_paged.options.keywords import CallKeywords, GenerateKeywords, StreamKeywords, with_keywords
from hf_paged.options.processors import tokenizer_in
from hf_paged.options.prompts import check_tokenizer
from hf_paged.options.request_spec import RequestSpec
from hf_paged.outputs import Completion, StepOutput, WarmUpReport
from hf_paged.parallel.launch import Workers
from hf_paged.vllm_names import unknown_method

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_PARTING_S = 2.0  # seconds that ranks have to end after the command to stop


class PagedGenerator:
    """A generator for lists of prompts on the paged engine. Its model is enabled until the generator is closed.

    Args:
        model: a causal LM that `hf_paged.enable` accepts.
        tokenizer: needed for text prompts and for `Completion.text`; for chats with images a processor.
        config: how to run; None means the defaults.
        **overrides: single fields of `PagedConfig`.

    Attributes:
        model: the model, whose `model.generate` and other methods may be called at the same time.
        engine: the `Engine` of the model.

    Raises:
        UnsupportedModelError: the model is not supported.
        ValueError: the model is enabled already.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Any = None, config: PagedConfig | None = None,
                 **overrides: Any) -> None:
        check_tokenizer(tokenizer)
        if is_enabled(model):
            raise ValueError("model: it is enabled already; call hf_paged.disable(model) first, or use model.generate")
        self.model: Any = model
        self._causal_lm: PreTrainedModel = unwrap(model)
        self.engine: Engine = enable_with_engine(
            model, merged_config(config, overrides), tokenizer=tokenizer_in(tokenizer), owns_device=True
        )
        self._reader = CallReader(self.engine, self._causal_lm)
        self.tokenizer = tokenizer
        self._async_calls = AsyncCalls(self.engine, self._reader)
        self._workers: list[Workers] = []
        self._close = weakref.finalize(self, _end, weakref.ref(self._causal_lm), self.engine, self._workers,
                                       self._async_calls.thread, os.getpid())

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike, *, dtype: str | torch.dtype = "auto",
                        device: str | torch.device | None = None, tensor_parallel_size: int = 1,
                        config: PagedConfig | None = None, tokenizer: Any = None, device_map: Any = None,
                        trust_remote_code: bool = False, **kwargs: Any) -> PagedGenerator:
        """Load model and tokenizer and build a generator around them.

        Args:
            path_or_id: a local checkpoint or a model id.
            dtype: dtype of the weights; "auto" means the checkpoint's.
            device: the device; None means the current CUDA device, or the CPU without one.
            tensor_parallel_size: number of GPUs (or, on CPUs, processes) over which the model is sharded. In a plain
                script this process is rank 0 and starts the others, which end with the generator. Under torchrun or
                accelerate launch it is the number of ranks, which all make the same calls: rank 0 gets the results,
                others None. See docs/parallel.md.
            config: as for `PagedGenerator`.
            tokenizer: the tokenizer, or a processor; None means the checkpoint's, or none if it has none.
            device_map: in place of `device`, one device: its name or number, ``{"": device}``, or "auto" if there is no
                more than one GPU.
            trust_remote_code: run code of the checkpoint.
            **kwargs: single fields of `PagedConfig`; all others go to ``AutoModelForCausalLM.from_pretrained``
                (``revision``, ``quantization_config``, ``attn_implementation``, ...), and those that say where files
                are found (``revision``, ``token``, ``cache_dir``, ``subfolder``, ...) to the tokenizer, too. Several
                ranks read safetensors files themselves, and accept only the last kind.

        Raises:
            ValueError: the model, the devices or the processes do not allow tensor_parallel_size; a device_map over
                several devices; an argument that several ranks cannot carry out.
            TypeError: an argument that neither `PagedConfig` nor transformers knows.
            OSError: there is no such folder, or no model in it, or transformers finds none under this id.
            WorkerDiedError: a rank ended before all were ready; the message holds its error.
        """
        require_int("tensor_parallel_size", tensor_parallel_size, 1)
        check_tokenizer(tokenizer)
        loading, overrides = split_arguments(kwargs, dtype, device, device_map, trust_remote_code)
        settings = merged_config(config, overrides)
        check_checkpoint(path_or_id, loading)
        if tensor_parallel_size == 1:
            tokenizer = tokenizer_of(path_or_id, loading) if tokenizer is None else tokenizer
            return cls(load_whole(path_or_id, loading), tokenizer, settings)
        with load_on_ranks(path_or_id, tensor_parallel_size, loading.dtype, loading.device, settings,
                           loading.of_ranks(tensor_parallel_size)) as (model, workers):
            tokenizer = tokenizer_of(path_or_id, loading) if tokenizer is None else tokenizer
        try:
            with nullcontext() if workers is None else workers.step():  # ranks build their engines together
                generator = cls(model, tokenizer, settings)
            if workers is not None:
                generator._workers.append(workers)
                generator.engine.lead(workers.step, workers.close)
            generator.engine.room(1)  # the KV pool: every rank is ready when this returns
        except BaseException:
            if workers is not None:
                workers.close()
            raise
        return generator

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer; another one, or a processor, may be set between calls."""
        return self.engine.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.engine.tokenizer = text_tokenizer = tokenizer_in(tokenizer)
        self._reader.processor = None if text_tokenizer is tokenizer else tokenizer

    @property
    def processor(self) -> Any:
        """The processor that was given as tokenizer, or None."""
        return self._reader.processor

    # -- generation -------------------------------------------------------------------------------------------------

    @with_keywords(CallKeywords, others="generate_kwargs")
    def generate(self, prompts: Any = None, generation_config: Any = None, *, use_tqdm: bool | None = None,
                 **keywords: Unpack[GenerateKeywords]) -> Any:
        """Complete every prompt.

        Args:
            prompts: a str, token ids, a chat (a list of messages, each a dict with a role and a content: text, or a
                list of texts and, with a processor, images as transformers takes them), ``{"prompt": str}`` or
                ``{"prompt_token_ids": ids}``, or a list of such prompts. To continue a request that was ended half-way,
                its `Completion`, or ``"output_token_ids": ids`` beside the prompt in its dict (see
                `Engine.add_request`). Or None, with tensors ``input_ids=`` and ``attention_mask=`` as for
                `model.generate`.
            generation_config: one for all prompts, or a list with one per prompt. Merged as in stock generate:
                ``generate_kwargs`` over the config over `model.generation_config`.
            use_tqdm: show a bar of the new tokens. None shows it once the call has taken a second. Not for tensors.
            **keywords: the keywords of `CallKeywords`.
            **generate_kwargs: fields of a `GenerationConfig`; for prompts that are chats also parameters of
                `apply_chat_template` (``tools``, ``documents``, ``chat_template``, ``continue_final_message``,
                ``add_generation_prompt``: True unless a message is continued) and variables that the chat template
                refers to (``enable_thinking``). ``tools``, ``documents`` and ``enable_thinking`` are ignored if None.

        Returns:
            One `Completion` per prompt, in order; with ``num_return_sequences=n``, n in a row per prompt. For tensors,
            the tensor of `model.generate`. A request that fails while it runs ends alone, with
            ``finish_reason="error"``, whatever ``on_error`` is.

        Raises:
            ValueError, TypeError: an argument is invalid; the message names it (``prompts[i]`` for a prompt), its value
                and what is accepted, and nothing runs. With ``on_error="complete"`` only for arguments that are wrong
                for every prompt.
            UnsupportedOptionError: an option that is not native; `model.generate` carries it out.
            UnsupportedModelError: the model cannot run natively as it is now (hooks, wrappers, dtypes).
        """
        call = Call.of(prompts, generation_config, **keywords)
        if "input_ids" in call.keywords or isinstance(prompts, torch.Tensor):
            call.check_for_tensors(self.engine.num_logits)
            with within(CALL_SALT, salt_digest(call.cache_salt)):
                made = self._generate_tensor(call)
            return None if self._only_follows else made
        with Progress(self.engine, False if self._only_follows else use_tqdm) as progress:
            return self._complete(call, self._reader.read(call), progress)

    @property
    def _only_follows(self) -> bool:
        """Whether this is a rank > 0 of ranks that run the same script, which returns no results."""
        return self.engine.group.rank > 0

    @with_keywords(StreamKeywords, others="generate_kwargs")
    def stream(self, prompts: Any, generation_config: Any = None,
               **keywords: Unpack[GenerateKeywords]) -> Iterator[tuple[int, StepOutput]]:
        """Like `generate`, but yields (index of the completion, `StepOutput`) for each new token; without ``best_of``.

        Arguments are checked, and requests made, by the call itself, before the first item. Closing the iterator ends
        unfinished requests. With ``on_error="complete"`` a prompt that cannot run has one output, which comes first
        and whose `request_id` is empty.
        """
        call = Call.of(prompts, generation_config, **keywords)
        call.check_for_stream()
        planned = self._reader.read(call)

        def outputs() -> Iterator[tuple[int, StepOutput]]:
            self.engine.check_runnable()
            with paths.counting(self.engine) as counted, self.engine.session(stream=True) as session:
                for index, output in chain.from_iterable(self._drive(session, call, planned)):
                    if not self._only_follows:
                        counted.num_tokens += len(output.new_token_ids)
                        yield index, output

        return outputs()

    async def agenerate(self, prompts: Any, generation_config: Any = None,
                        **kwargs: Unpack[GenerateKeywords]) -> list[Completion]:
        """Await `generate`: other tasks of the event loop run, and tasks that wait at the same time share steps.

        Cancelling the task ends its requests before the next step. May be called from several event loops, in several
        threads, and beside `generate`. Requests are made in a thread of the loop's executor (`asyncio.to_thread`).

        Args:
            prompts, generation_config, **kwargs: as for `generate`, without ``use_tqdm`` and tensors.

        Raises:
            Exception: as `generate`. An error of a step is raised in all calls that wait.
            EngineClosedError: the generator was closed during the call.
        """
        return await self._async_calls.completions(Call.of(prompts, generation_config, **kwargs))

    def astream(self, prompts: Any, generation_config: Any = None,
                **kwargs: Unpack[GenerateKeywords]) -> AsyncIterator[tuple[int, StepOutput]]:
        """Return an async iterator like `stream`; see `agenerate`. Arguments are checked by the first ``anext``.

        Unfinished requests end with the task that awaits an item, or when the iterator is closed: ``async with
        contextlib.aclosing(generator.astream(...)) as outputs`` closes it wherever the block is left.
        """
        return self._async_calls.outputs(Call.of(prompts, generation_config, **kwargs))

    def cancel(self, request_id: str) -> bool:
        """End one prompt of a call that runs in another thread or task, or that is being streamed.

        The prompt's `Completion` has the output so far, with ``finish_reason="abort"``; the call's other prompts
        continue. Waits for the step under way.

        Args:
            request_id: an id of `request_ids` (for all its ``num_return_sequences``), or a `StepOutput.request_id`.

        Returns:
            Whether a request was ended: False once the prompt is done, and for unknown ids.
        """
        found = False
        for one in self.engine.unfinished_copies(request_id):
            with suppress(KeyError):  # the request has ended since the line above
                self.engine.abort(one)
                found = True
        return found

    def warm_up(self, prompts: Any = None, generation_config: Any = None,
                **keywords: Unpack[GenerateKeywords]) -> WarmUpReport:
        """Make the generator ready, as `Engine.warm_up` does; a call of `generate` is the example."""
        call = partial(self.generate, prompts, generation_config, use_tqdm=False, **keywords)
        return self.engine.warm_up_by((lambda: None) if prompts is None else call)

    # -- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *,
                     partial: bool = False) -> None:
        """Write new values into the model's weights, on all its ranks and also while requests run; see
        `Engine.load_weights`."""
        self.engine.load_weights(weights, partial=partial)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and whole tensors, on the host, of the unsharded model's `state_dict`; see
        `Engine.named_weights`."""
        return self.engine.named_weights()

    def load_adapter(self, name: str, adapter: Any, config: Any = None) -> None:
        """Add a LoRA adapter, on all ranks, that prompts may name by ``adapter_names``; see `Engine.load_adapter`."""
        self.engine.load_adapter(name, adapter, config)

    def set_adapter(self, names: str | Sequence[str] | None) -> None:
        """Activate adapters for prompts that name none; see `Engine.set_adapter`."""
        self.engine.set_adapter(names)

    def delete_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; see `Engine.delete_adapter`."""
        self.engine.delete_adapter(name)

    def metrics(self, registry: CollectorRegistry | None = None) -> CollectorRegistry:
        """Return a registry of prometheus_client with this generator's metrics; as `hf_paged.metrics` of its model."""
        return metrics_of(self.engine, registry)

    def close(self) -> None:
        """Disable the model and free the KV pool; the model stays usable. Safe to call twice; called when the generator
        is garbage-collected. Calls that wait in other threads and tasks end with `EngineClosedError`."""
        self._close()

    def __repr__(self) -> str:
        """Return one line: the checkpoint, the tokenizer's class, and the state of the engine."""
        name = getattr(self._causal_lm, "name_or_path", "")
        checkpoint = f"{reprlib.repr(name)}, " if name else ""
        tokenizer = None if self.tokenizer is None else type(self.tokenizer).__name__
        return f"PagedGenerator({checkpoint}tokenizer={tokenizer}, {self.engine!r})"

    def __enter__(self) -> PagedGenerator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a PagedGenerator cannot be pickled or copied: it holds a KV pool, threads and locks of this "
                        "process. Pickle what it is made from, and call PagedGenerator.from_pretrained(...) (or "
                        "PagedGenerator(model, ...)) in the process that generates; hf_paged.ray_data does so in its "
                        "actors")

    # -- inside -----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(unknown_method(type(self).__name__, name), name=name, obj=self)

    def _complete(self, call: Call, planned: list[RequestSpec | Completion],
                  progress: Progress) -> list[Completion] | None:
        """Run requests to their ends, and return the result of `generate`."""
        ended: dict[int, StepOutput] = {}
        with paths.counting(self.engine) as counted, self.engine.session() as session:
            progress.begin(session, len(planned))
            for outputs in self._drive(session, call, planned):
                progress.step(output for _, output in outputs)
                ended.update(outputs)
            if self._only_follows:
                return None
            if len(ended) < len(planned):
                raise EngineClosedError("the engine was closed by another thread during the call")
            return counted.completions(best_outputs(planned, [ended[i] for i in range(len(planned))]))

    def _drive(self, session: Session, call: Call,
               planned: list[RequestSpec | Completion]) -> Iterator[list[tuple[int, StepOutput]]]:
        """Run requests to their ends, and yield each step's outputs with the indexes of their completions. Outputs of
        prompts that cannot run are yielded before the first step, once all other requests are added."""
        index, refused = numbered(call, planned, self.engine.add_all(session, runnable(planned)))
        yield refused
        while session.unfinished():
            yield [(index[output.request_id], output) for output in self.engine.advance([session])[0]]

    def _generate_tensor(self, call: Call) -> torch.Tensor:
        prompts, generation_config, kwargs, seed = call.prompts, call.generation_config, call.keywords, call.seed
        if call.structured is not None:
            kwargs = {"tokenizer": self.tokenizer, **kwargs, "structured": call.structured}
        if isinstance(prompts, torch.Tensor):
            kwargs = {"input_ids": prompts, **kwargs}
        elif prompts is not None:
            raise ValueError("prompts: expected None where input_ids= is given")
        input_ids = kwargs["input_ids"]
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
            found = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise TypeError(f"input_ids: expected a tensor [batch, length], got {found}")
        if generation_config is not None and not isinstance(generation_config, GenerationConfig):
            raise TypeError("generation_config: expected one GenerationConfig for tensors")
        generate = partial(self.model.generate, generation_config=generation_config, **kwargs)
        with self._named(call.adapter_names, len(input_ids), generation_config, kwargs):
            if seed is None:
                return generate()
            seed, device = base_seed(seed, self.engine.config.seed), self._causal_lm.device
            # The seed for a native call; torch's generators are seeded for a call that runs in stock.
            with within(CALL_SEED, seed), torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                return generate()

    def _named(self, names: Any, count: int, config: Any, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a context in which `model.generate` of ``count`` prompts uses each prompt's adapter."""
        if names is None:
            return nullcontext()
        asked = [None if name is None else self.engine.check_adapter(name)
                 for name in one_per_prompt("adapter_names", names, count)]
        if None in asked:
            raise ValueError("adapter_names: expected a name for every row, or none at all, where tensors come in")
        merged = merge_config(self._causal_lm, config, {k: v for k, v in kwargs.items() if hasattr(_NEUTRAL, k)})
        return each_under(self._causal_lm, [str(name) for name in asked], merged)


_NEUTRAL = GenerationConfig()


def _end(model: weakref.ref, engine: Engine, workers: list[Workers], thread: EngineThread, owner: int) -> None:
    thread.stop(now=False)
    if workers and os.getpid() != owner:  # a fork shares rank 0's connections: using them would corrupt its messages
        return
    engine.after_step(partial(_end_between_steps, model, engine, workers))


def _end_between_steps(model: weakref.ref, engine: Engine, workers: list[Workers]) -> None:
    causal_lm = model()
    try:
        if causal_lm is not None and is_enabled(causal_lm) and get_engine(causal_lm) is engine:
            disable(causal_lm)
        elif workers:
            engine.shutdown()
    finally:
        for started in workers:
            started.close(_PARTING_S)
