"""Requests that name a LoRA adapter, which may be added, changed and removed while the requests run."""

from __future__ import annotations

from collections.abc import Iterable

from hf_paged.engine.features import StepFeature
from hf_paged.engine.session import Request
from hf_paged.models import ModelExecutor


class Adapters(StepFeature):
    """A check that the model has the adapters that requests name, and can run them.

    Args:
        executor: the executor of the model.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        super().__init__()
        self._executor = executor
        self._structure = 0  # number of the model's structure (`ModelWatch`) when it was last compared

    def uses(self, request: Request) -> bool:
        return request.spec.adapter_name is not None

    def model_may_differ(self) -> bool:
        watch = self._executor.watch
        if (structure := watch.step_structure(self._executor.model)) == self._structure:
            return False
        self._structure = structure
        watch.compare_again()
        return True

    def prepared(self) -> None:
        executor = self._executor
        self._structure = executor.watch.step_structure(executor.model) if executor.adapter_names else 0

    def unfit(self, requests: Iterable[Request]) -> list[tuple[Request, str]]:
        named = [(request, name) for request in requests if (name := request.spec.adapter_name) is not None]
        errors = self.errors(name for _, name in named)
        return [(request, errors[name]) for request, name in named if name in errors]

    def errors(self, names: Iterable[str | None]) -> dict[str, str]:
        """Return an error message by name for each of these adapters that rows cannot use on the model as it is now."""
        reasons = {name: self._executor.why_not_adapter(name) for name in dict.fromkeys(names) if name is not None}
        return {name: f"adapter_name={name!r}: {reason.with_remedy}" for name, reason in reasons.items() if reason}
