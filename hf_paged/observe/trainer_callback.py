"""Callback for the Trainer of transformers and TRL that adds the engine's rates to each log."""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_paged.engine.engine import Engine
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.enable import get_engine
from hf_paged.observe.progress import activity
from hf_paged.outputs import EngineStats

PREFIX = "hf_paged/"


class PagedStatsCallback(TrainerCallback):
    """Adds figures of the model's engine to every log of a trainer: ``trainer.add_callback(PagedStatsCallback())``.

    Each log gets tokens per second (``hf_paged/generated_per_second``, ``prefill_per_second``), the share of prompt
    tokens found in the prefix cache (``hit_rate``), the share of KV blocks in use (``kv_used``), requests
    (``num_running``, ``num_waiting``), preemptions, and the calls of `generate` by path (``calls_native``,
    ``calls_lockstep``, ``calls_stock``), all since the last log. `trainer.state.log_history`, later callbacks and a run
    of Weights & Biases get them. While the model is not enabled, logs stay unchanged. In a run of several processes
    each process adds its own figures, and the main one reports.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._before: EngineStats | None = None
        self._at = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                       **kwargs: Any) -> None:
        """Read the counters as the start of the first interval."""
        self._look(kwargs.get("model"))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures since the last log."""
        before, engine, since = self._before, self._engine, self._at
        now = self._look(kwargs.get("model"))
        if now is None or logs is None:
            return
        if before is None or self._engine is not engine:
            return  # no earlier reading of this engine
        figures: dict[str, float] = activity(before, now, max(self._at - since, 1e-9))
        for path in now.calls:
            figures[f"calls_{path}"] = now.calls[path].num_calls - before.calls[path].num_calls
        found = {PREFIX + name: float(value) for name, value in figures.items()}
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)
        _log_to_wandb(found, state)

    def _look(self, model: Any) -> EngineStats | None:
        try:
            self._engine = get_engine(model)
        except (UnsupportedModelError, ValueError):  # not enabled (yet)
            self._engine = self._before = None
            return None
        self._before, self._at = self._engine.stats(), time.perf_counter()
        return self._before


def _log_to_wandb(figures: dict[str, float], state: TrainerState) -> None:
    """Log to Weights & Biases, since Trainer's own callback runs before the user's and has sent the log already."""
    wandb = sys.modules.get("wandb")  # imported only in a process that uses it
    if state.is_world_process_zero and wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.log({**figures, "train/global_step": state.global_step})
