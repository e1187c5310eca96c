"""Data parallel generation by Ray Data: actors with a `PagedGenerator` each complete the rows of a dataset."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_paged.config import require_int
from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.generator import PagedGenerator
from hf_paged.integration.requests import ON_ERROR, error_text
from hf_paged.optional import require
from hf_paged.options.arguments import base_seed, merge_config
from hf_paged.options.chat_keywords import split_keywords
from hf_paged.options.prompts import is_chat, prompt_ids
from hf_paged.options.settings import request_spec
from hf_paged.outputs import Completion

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

_BROKEN = (WorkerDiedError, EngineClosedError)  # nothing more can be generated in this process
OUTPUTS = ("", "_token_ids", "_finish_reason", "_error")  # suffixes of the added columns


def generate_dataset(dataset: Dataset, path: str, *, num_actors: int = 1, batch_size: int = 1024,
                     tensor_parallel_size: int = 1, num_gpus: float | None = None,
                     ray_options: dict[str, Any] | None = None, **actor_arguments: Any) -> Dataset:
    """Complete every row of `dataset` on `num_actors` actors; lazy, as every operation of Ray Data.

    An actor that dies is started anew, and rows that it had not delivered are generated again, to the same tokens (see
    `PagedActor`): no row is lost or duplicated. Rows come in no particular order.

    Args:
        dataset: with a column of prompts; see `PagedActor`.
        path: a checkpoint that every node can read, or a model id.
        num_actors: actors; each holds the whole model, on `tensor_parallel_size` GPUs of one node.
        batch_size: rows in one call of an actor, which ends with its longest completion: several times `max_num_seqs`
            keep the engine full. After the death of an actor that many rows are generated again.
        tensor_parallel_size: GPUs of an actor.
        num_gpus: GPUs that Ray reserves for an actor. None: `tensor_parallel_size`, or 0 if the cluster has no GPU.
        ray_options: more arguments of `Dataset.map_batches`: num_cpus, resources, accelerator_type, runtime_env, ...
        **actor_arguments: arguments of `PagedActor`.

    Returns:
        A dataset with the columns of `dataset` and the columns that `PagedActor` adds.

    Raises:
        ImportError: Ray Data is not installed.
        ValueError, TypeError: for a wrong argument, named with its value. Errors that only an actor can see (no such
            checkpoint or column, generation settings) end the dataset's execution, wrapped in Ray's error.
    """
    require("ray", "generate_dataset")
    import ray
    from ray.data import ActorPoolStrategy

    counts = {"num_actors": num_actors, "batch_size": batch_size, "tensor_parallel_size": tensor_parallel_size}
    for name, value in counts.items():
        require_int(name, value, 1)
    base_seed(actor_arguments.get("seed", 0), None)
    if num_gpus is None and ray.cluster_resources().get("GPU", 0) > 0:
        num_gpus = tensor_parallel_size
    # Blocks of one batch each: a block is the unit that Ray hands to an actor, and repeats after the actor's death by
    # Ray Data's defaults for actors (max_restarts=-1, max_task_retries=-1).
    return dataset.repartition(target_num_rows_per_block=batch_size, strict=True).map_batches(
        PagedActor,
        fn_constructor_args=(path,),
        fn_constructor_kwargs={"tensor_parallel_size": tensor_parallel_size, **actor_arguments},
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=num_actors),
        num_gpus=num_gpus,
        **(ray_options or {}),
    )


class PagedActor:
    """Callable class that holds a `PagedGenerator`, for `Dataset.map_batches(..., batch_format="pyarrow")`.

    A row's tokens depend on its prompt, the settings and `row_seed` of its id (or prompt), not on its batch or actor.

    Args:
        path: a checkpoint that the actor's node can read, or a model id.
        tensor_parallel_size: GPUs that hold the model together; the actor is rank 0 and starts the other ranks on the
            GPUs that Ray assigned to the actor.
        prompt_column: column of text, token ids, chats (lists of structs with role and content), or structs with prompt
            (text) or prompt_token_ids.
        output_column: column for the completion's text (null without a tokenizer). Further columns have its name in
            front: `_token_ids` (list of int64), `_finish_reason` and `_error` (null, or the row's error: then
            `_finish_reason` is "error"). With ``on_error="complete"`` a row that cannot run (an empty prompt, no id)
            ends alone.
        id_column: column of integers or strings, one for each row, from which the row's random numbers follow. None:
            they follow from the prompt, so that equal prompts get equal completions.
        adapter_column: column of names of the LoRA adapters that the checkpoint has, one for each row ("__base__" for
            none, null for the active adapters); `adapter_names` of ``generate_kwargs`` names one for all rows.
        generation_config, generate_kwargs: as for `PagedGenerator.generate`, keywords of the chat template among them;
            one completion for a row.
        on_error: "complete", or "raise": a row that cannot run ends the dataset's execution.
        seed: seed of all rows together; with another seed sampling draws other tokens.
        **overrides: more arguments of `PagedGenerator.from_pretrained`.

    Raises:
        ValueError, TypeError, UnsupportedOptionError: for settings that no row could run with.
    """

    def __init__(self, path: str, *, tensor_parallel_size: int = 1, prompt_column: str = "prompt",
                 output_column: str = "completion", id_column: str | None = None, adapter_column: str | None = None,
                 generation_config: Any = None, generate_kwargs: dict[str, Any] | None = None, seed: int = 0,
                 on_error: str = "complete", **overrides: Any) -> None:
        self._prompt_column, self._id_column = prompt_column, id_column or prompt_column
        self._adapter_column = adapter_column
        self._output_columns = [output_column + suffix for suffix in OUTPUTS]
        self._config, self._kwargs = generation_config, generate_kwargs or {}
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error={on_error!r:.80}: expected one of {ON_ERROR}")
        self._seed, self._on_error = base_seed(seed, None), on_error
        self._generator = PagedGenerator.from_pretrained(path, tensor_parallel_size=tensor_parallel_size, **overrides)
        engine = self._generator.engine
        if (name := self._kwargs.get("adapter_names")) is not None:
            if adapter_column is not None:
                raise ValueError(f"adapter_column={adapter_column!r}: expected no adapter_names beside it")
            engine.check_adapter(name)
        settings = {name: value for name, value in self._kwargs.items()
                    if name not in ("chat_template_kwargs", "adapter_names")}
        _, settings = split_keywords(settings, self._kwargs.get("chat_template_kwargs"), [],
                                     self._generator.processor or engine.tokenizer,
                                     [engine.model.generation_config, self._config])
        merged = merge_config(engine.model, self._config, settings)
        if merged.num_return_sequences not in (None, 1):
            raise ValueError(f"num_return_sequences={merged.num_return_sequences!r}: expected 1; give a row for "
                             "each, with an id of its own")
        engine.stop_rule(request_spec(merged, 1, engine.num_logits), [])

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return `batch` with the output columns appended.

        After a rank of the model died or its engine broke, an actor of Ray ends its own process: Ray restarts dead
        actors and repeats their blocks, while an exception would end the dataset's execution.

        Raises:
            ValueError: a column is missing, or an output column exists already.
            WorkerDiedError, EngineClosedError: outside of Ray, if a rank of the model died or its engine broke.
        """
        try:
            return self._completed(batch)
        except _BROKEN as error:
            if _in_actor():
                print(f"hf_paged: this actor ends, to be started anew: {type(error).__name__}: {error}",
                      file=sys.stderr, flush=True)
                with suppress(Exception):
                    self._generator.close()  # free the GPUs, which the restarted actor needs
                os._exit(1)
            raise

    def _completed(self, batch: pa.Table) -> pa.Table:
        import pyarrow as pa

        self._check_columns(batch.column_names)
        prompts, keys = (batch.column(name).to_pylist() for name in (self._prompt_column, self._id_column))
        seeds = [self._seed_of(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
        adapters = [None] * len(prompts)
        if self._adapter_column is not None:
            adapters = batch.column(self._adapter_column).to_pylist()
        rows = [(prompt, seed, adapter) for prompt, seed, adapter in zip(prompts, seeds, adapters, strict=True)
                if isinstance(seed, int)]
        made = iter(self._generate(rows) if rows else ())
        completions = [next(made) if isinstance(seed, int) else seed for seed in seeds]
        columns = (
            pa.array([c.text for c in completions], pa.string()),
            pa.array([c.token_ids for c in completions], pa.list_(pa.int64())),
            pa.array([c.finish_reason for c in completions], pa.string()),
            pa.array([c.error for c in completions], pa.string()),
        )
        for name, column in zip(self._output_columns, columns, strict=True):
            batch = batch.append_column(name, column)
        return batch

    def _check_columns(self, names: list[str]) -> None:
        for argument, name in (("prompt_column", self._prompt_column), ("id_column", self._id_column),
                               ("adapter_column", self._adapter_column)):
            if name is not None and name not in names:
                raise ValueError(f"{argument}={name!r}: expected one of the dataset's columns, {names}")
        if taken := [name for name in self._output_columns if name in names]:
            raise ValueError(f"output_column={self._output_columns[0]!r}: the dataset has columns {taken} already")

    def _seed_of(self, prompt: Any, key: Any) -> int | Completion:
        """Return a row's seed, or an error's `Completion` for a row without an id or with a mere part of a prompt."""
        try:
            if isinstance(prompt, int) or is_chat([prompt]):  # a list of ints or messages would be one prompt
                prompt_ids(prompt, None, {})
            return row_seed(key, self._seed)
        except Exception as error:
            if self._on_error == "raise":
                raise
            return Completion([], None, "error", [], error=error_text(error))

    def _generate(self, rows: list[tuple[Any, int, Any]]) -> list[Completion]:
        prompts, seeds, adapters = map(list, zip(*rows, strict=True))
        named: dict[str, Any] = {} if self._adapter_column is None else {"adapter_names": adapters}
        return self._generator.generate(prompts, self._config, seed=seeds, use_tqdm=False, on_error=self._on_error,
                                        **named, **self._kwargs)


def _in_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def row_seed(key: Any, seed: int = 0) -> int:
    """Return the seed by which `PagedActor` runs a row: ``PagedGenerator.generate(prompt, seed=row_seed(id, seed))``.

    Args:
        key: the row's id (an integer or a string) or, without ids, its prompt: a string, token ids or a chat.
        seed: seed of the whole dataset, in [0, 2**63).

    Returns:
        A number in [0, 2**63), the same on every machine: BLAKE2b (RFC 7693) of the key as JSON, keyed by `seed`.

    Raises:
        TypeError: for another key, such as the None or NaN of a missing id.
    """
    if key is None or isinstance(key, float):
        raise TypeError(f"row id {key!r}: expected an integer or a string")
    text = json.dumps(key, ensure_ascii=False, sort_keys=True, default=_plain)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1


def _plain(value: Any) -> Any:
    """Convert NumPy's arrays and integers to lists and ints, so that a column's type does not decide the seed."""
    if isinstance(value, (np.ndarray, np.integer)):
        return value.tolist()
    raise TypeError(f"row id holds {value!r:.80}, {type(value).__name__}: expected an integer or a string")
