"""Which version of the weights made each token of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import LastOutput, Request
from hf_paged.options.prompts import known_versions
from hf_paged.outputs import VersionRun, first_of, last_of


class Versions(StepFeature):
    """The versions of the weights that generated each request's output; runs of the present version are added when the
    weights change or the request ends.

    Args:
        present: returns the present version of the weights.
    """

    def __init__(self, present: Callable[[], int]) -> None:
        super().__init__()
        self._present = present
        self._runs: tuple[VersionRun, ...] = ()  # a run of one token, which all outputs of this version share

    def uses(self, request: Request) -> bool:
        return True

    def admit(self, request: Request) -> None:
        if request.spec.previous is not None:
            request.version_runs = known_versions(request.spec.previous)

    def start_over(self, request: Request, made: list[int]) -> None:
        request.version_runs = first_of(request.version_runs, len(made))

    def weights_changed(self, request: Request, version: int) -> None:
        count = request.sequence.num_output_tokens - sum([run.num_tokens for run in request.version_runs])
        if count:
            request.version_runs.append(VersionRun(version, count))

    def stream(self, request: Request, step: CommittedStep, row: int, fields: dict[str, Any]) -> None:
        if not self._runs or self._runs[0].version != step.weights_version:
            self._runs = (VersionRun(step.weights_version, 1),)
        fields["version_runs"] = self._runs

    def complete(self, request: Request, last: LastOutput) -> None:
        self.weights_changed(request, self._present())
        if request.num_kept is not None:
            request.version_runs = first_of(request.version_runs, request.num_kept)
        runs = last.completion["version_runs"] = tuple(request.version_runs)
        last.output["version_runs"] = last_of(runs, len(last.fresh))
