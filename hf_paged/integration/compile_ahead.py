"""Kernels of a checkpoint compiled into Triton's cache on a machine without its GPU, as where an image is built.

An engine's own steps are run dry, on a GPU that is not there (`kernels/build/absent_gpu.py`): those that
``warmup="full"`` looks at, the largest step, and steps in one launch. The manifest of such an engine then names what
they need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from hf_paged.attention.registry import check_backend
from hf_paged.config import PagedConfig, executor_options
from hf_paged.device.cuda import upload
from hf_paged.engine.locked_core import fitting
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.explain import model_of_config
from hf_paged.kernels._triton import triton
from hf_paged.kernels.build import absent_gpu, kernel_log
from hf_paged.kernels.build.absent_gpu import GpuModel
from hf_paged.kernels.build.compiling import compiled_before
from hf_paged.kernels.hopper.decoder_layers_support import ROWS
from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models import ModelExecutor, find_executor, why_no_executor
from hf_paged.models.images.tower_attention import tower_launches
from hf_paged.parallel.checkpoint import check_place, naming_the_place
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.manifest import Manifest, manifest_path
from hf_paged.runner.memory import largest_step, runner_kind
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.step_shape import StepShape

logger = logging.getLogger(__name__)

_NUM_BLOCKS = 4096  # of the pool, whose size decides no kernel


class CompileReport(NamedTuple):
    """What is in the cache now.

    Attributes:
        num_compiled, num_found: Numbers of kernels that were compiled, and that were in the cache.
        failed: Names of kernels that do not compile, and errors of steps, whose kernels may be missing.
        folder: Triton's cache.
        manifest: The manifest, or None if it cannot be written.
    """

    num_compiled: int
    num_found: int
    failed: list[str]
    folder: Path
    manifest: Path | None


def compile_ahead(path_or_id: str, config: PagedConfig, gpu: GpuModel, *, dtype: str = "auto",
                  trust_remote_code: bool = False) -> CompileReport:
    """Compile the kernels of a `PagedGenerator`, or a server, of one GPU; the process can do nothing else afterwards.

    Weights are not read. Kernels of adapters, autocast, quantized weights, several GPUs and rare edits of logits, and
    those of other packages (FlashAttention) are not compiled.

    Args:
        path_or_id: As for `preview`.
        config: The engine's, on which the kernels depend.
        gpu: The GPU of the engine.
        dtype: As for `from_pretrained`.

    Raises:
        UnsupportedModelError: If hf_paged does not support the model's class.
        ValueError: If the config or the model cannot be compiled for.
        RuntimeError: If Triton is missing or interprets kernels.
    """
    if triton is None or triton.knobs.runtime.interpret:
        raise RuntimeError("Triton is missing, or interprets kernels: install it, and unset TRITON_INTERPRET")
    check_place("model", path_or_id, ("config.json",))
    with naming_the_place("model", path_or_id):
        of_model = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
    if getattr(of_model, "quantization_config", None) is not None:
        raise ValueError(f"model={path_or_id!r}: expected no quantized weights, whose layers only a loaded model has")
    model = model_of_config(path_or_id, dtype, False, trust_remote_code)  # which the executor does not keep
    absent_gpu.place_as_on_gpu(model)
    executor = _executor_of(model, config)
    absent_gpu.pretend(gpu)
    before = kernel_log.counts()
    with absent_gpu.CountsAsGpu(), torch.inference_mode():
        config, spec = fitting(config, executor), executor.kv_spec()
        check_backend(config.attention_backend, spec.attention(config.block_size))
        manifest = Manifest(path := manifest_path(executor, spec, config))
        errors: dict[str, None] = {}
        works = (partial(_noting, errors, work) for work in _works(executor, config))
        failed = compiled_before(works, is_complete=True)
    manifest.save()
    compiled, found = (now - then for now, then in zip(kernel_log.counts(), before, strict=True))
    written = path if path is not None and path.is_file() else None
    return CompileReport(compiled, found, [*failed, *errors], Path(triton.knobs.cache.dir), written)


def _executor_of(model: PreTrainedModel, config: PagedConfig) -> ModelExecutor:
    """Return the model's executor, found on the CPU, where proofs of its class compute."""
    make = find_executor(model)
    if make is None:
        raise UnsupportedModelError(f"model={type(model).__name__}: {why_no_executor(model)}")
    return make(model, **executor_options(config))


def _noting(errors: dict[str, None], work: Callable[[], object]) -> None:
    """Run ``work``, whose errors a dry run swallows."""
    try:
        work()
    except Exception as error:
        logger.info("hf_paged: a step could not be looked at", exc_info=True)
        errors[f"{type(error).__name__}: {error}"[:300]] = None
        raise


def _works(executor: ModelExecutor, config: PagedConfig) -> Iterator[Callable[[], object]]:
    """Yield what an engine runs before it is ready and for its requests, longest compilations first."""
    spec, longest = executor.kv_spec(), executor.max_length(config.max_model_len)
    runner = runner_kind(executor, spec, config)(
        executor, spec, block_size=config.block_size, num_blocks=_NUM_BLOCKS, max_num_seqs=config.max_num_seqs,
        max_model_len=longest, max_num_batched_tokens=config.max_num_batched_tokens,
        attention_backend=config.attention_backend)
    runner.prepare()
    steps = PaddedSteps(executor, runner.cache, runner.state, runner.attention, config.max_num_batched_tokens)
    if not (config.enforce_eager or runner.attention.backend.waits):
        yield from (partial(_in_one_launch, steps, spec.device, rows) for rows in ROWS if rows <= config.max_num_seqs)
    yield largest_step(executor, spec, config, longest)
    yield from dry_runs(steps, config.max_num_seqs, config.max_num_batched_tokens, optional=True)
    yield from tower_launches(executor.source, spec.device)
    yield partial(ChecksumPlan().launch, [torch.empty(2, dtype=torch.int64, device=spec.device)])


def _in_one_launch(steps: PaddedSteps, device: torch.device, rows: int) -> Any:
    """Run decode rows whose layers one launch may compute."""
    shape = StepShape("decode", rows=rows, one_launch=True)
    arrays = steps.padding_of(shape)
    assert arrays is not None
    return steps.run(shape, *(upload(array, device) for array in arrays))
