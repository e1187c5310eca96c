"""What an engine does before it is ready, so that requests wait neither for kernels nor for captures.

`WarmUp.get_ready` lists the parts. A part that captures CUDA graphs ahead comes behind those that compile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import torch

from hf_paged.config import PagedConfig
from hf_paged.kernels.build.compiling import compiled_before, in_background, loaded
from hf_paged.models import ModelExecutor
from hf_paged.models.images.tower_attention import tower_launches
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.manifest import IdleSaver, Manifest, manifest_path
from hf_paged.runner.model_runner import ModelRunner

Launches = list[Callable[[], object]]


class WarmUp:
    """Warm-up of one engine, as `PagedConfig.warmup` says. Without a GPU it does nothing.

    Attributes:
        manifest: what earlier processes needed, to which this engine adds.
        is_done: no request should find a kernel missing any more.
    """

    def __init__(self, executor: ModelExecutor, config: PagedConfig) -> None:
        self._executor, self._config = executor, config
        self.manifest = Manifest(None)
        self.saver = IdleSaver(self, self.manifest)
        self.is_done = False
        self._loading: Future[Launches] | None = None  # returns launches of kernels that are not on the disk

    def begin(self) -> None:
        """Load, in a thread, the kernels of earlier processes that lie in Triton's cache on the disk."""
        spec = self._executor.kv_spec()
        if self._config.warmup is False or spec.device.type != "cuda":
            return

        def load() -> Launches:
            with suppress(Exception):  # without the file, kernels are compiled when they are needed
                manifest = Manifest(manifest_path(self._executor, spec, self._config),
                                    is_read_only=self._executor.group.rank > 0)
                self.manifest, self.saver = manifest, IdleSaver(self, manifest)
                with torch.cuda.device(spec.device):
                    return loaded(manifest.variants)
            return []

        self._loading = in_background(load)  # type: ignore[assignment]

    def get_ready(self, runner: ModelRunner, *, is_full: bool = False) -> None:
        """Finish the warm-up of a runner whose pool was built.

        Args:
            is_full: do what ``warmup="full"`` does.
        """
        if runner.device.type != "cuda":
            return
        missing: Launches = [] if self._loading is None else self._loading.result()
        self._loading = None
        if runner.graphs is not None:
            runner.graphs.uses = self.manifest.uses
        if is_full or self._config.warmup == "full":
            compiled_before([*missing, *self._steps(runner)])
            # Other ranks would have to capture, too, and shards of a trainer's model be gathered.
            if not self._executor.group.is_parallel and self._executor.replica is None:
                runner.capture_ahead(self._config.max_num_seqs, self.manifest.repeated())
        elif missing:
            in_background(lambda: self._compile(missing))
        self.is_done |= is_full or self._config.warmup == "full"

    def _steps(self, runner: ModelRunner) -> Launches:
        """Return the steps of all sizes that graphs hold, and those of optional features, with padding alone, and
        launches for images."""
        if self._executor.replica is not None:
            return []
        towers = list(tower_launches(self._executor.source, runner.device))
        if runner.graphs is None:
            return towers
        runner.prepare()
        return [*dry_runs(runner.graphs.steps, self._config.max_num_seqs, self._config.max_num_batched_tokens,
                          optional=True), *towers]

    def _compile(self, missing: Launches) -> None:
        with torch.cuda.device(self._executor.kv_spec().device):
            compiled_before(missing)
