"""A callback of transformers' Trainer, and so of TRL's, that logs what the engine of the model did between two logs."""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_paged.engine.engine import Engine
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.activity import activity
from hf_paged.integration.enable import get_engine
from hf_paged.outputs import EngineStats

PREFIX = "hf_paged/"


class PagedStatsCallback(TrainerCallback):
    """Adds figures of the model's engine to every log of a trainer: ``trainer.add_callback(PagedStatsCallback())``.

    Each log gets tokens a second (``hf_paged/generated_per_second``, ``prefill_per_second``), the share of prompt
    tokens found in the prefix cache (``hit_rate``), the share of KV blocks in use (``kv_used``), requests
    (``num_running``, ``num_waiting``), preemptions, and the calls of `generate` by path (``calls_native``,
    ``calls_lockstep``, ``calls_stock``), all since the log before. They stand in `trainer.state.log_history` and in
    what callbacks behind this one are given; a run of Weights & Biases gets them as well. While the model is not
    enabled, logs are as they were. In a run of several processes each adds its own, and the main one reports.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._before: EngineStats | None = None
        self._at = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                       **kwargs: Any) -> None:
        """Count from now on."""
        self._look(kwargs.get("model"))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add what happened since the last log."""
        before, engine, since = self._before, self._engine, self._at
        now = self._look(kwargs.get("model"))
        if now is None or logs is None:
            return
        if before is None or self._engine is not engine:
            return  # nothing to compare with
        figures: dict[str, float] = activity(before, now, max(self._at - since, 1e-9))._asdict()
        for path in now.calls:
            figures[f"calls_{path}"] = now.calls[path].num_calls - before.calls[path].num_calls
        found = {PREFIX + name: float(value) for name, value in figures.items()}
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)
        _tell_wandb(found, state)

    def _look(self, model: Any) -> EngineStats | None:
        try:
            self._engine = get_engine(model)
        except (UnsupportedModelError, ValueError):  # not enabled, as yet
            self._engine = self._before = None
            return None
        self._before, self._at = self._engine.stats(), time.perf_counter()
        return self._before


def _tell_wandb(figures: dict[str, float], state: TrainerState) -> None:
    """Trainer's own callback for it stands before those that a user adds, and has sent the log by now."""
    wandb = sys.modules.get("wandb")  # imported by whoever made a run
    if state.is_world_process_zero and wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.log({**figures, "train/global_step": state.global_step})
