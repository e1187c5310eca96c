"""Verdict of a proof, as it is handed on and stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Outcome = Literal["proved", "open", "refused"]


class Refused(Exception):
    """The reason, as a sentence, why a model does not run packed and paged with stock's numbers."""


@dataclass(frozen=True)
class Verdict:
    """Result of `prove` for a class, a config, an attention implementation and a dtype.

    "proved": packed steps give stock's numbers, within the limits. "open": all compared numbers agree, and `reason`
    names the code that the proof did not reach. "refused": `reason` names what differs or is missing.
    """

    outcome: Outcome
    reason: str = ""
    max_length: int | None = None  # tokens of a sequence up to which the proof holds; None: any number
    max_step_tokens: int | None = None  # tokens of a step up to which it holds; None without a proof
    seconds: float = 0.0  # of CPU time in the thread of the proof
    whole_prompts: bool = False  # whether recurrent layers have to compute a prompt at once

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values that `json` writes."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Verdict | None:
        """Return the verdict with these fields, or None if they are not the fields of a verdict."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            return None
        limits = (values["max_length"], values["max_step_tokens"])
        if (values["outcome"] not in get_args(Outcome) or not isinstance(values["reason"], str)
                or not isinstance(values["seconds"], (int, float)) or type(values["whole_prompts"]) is not bool
                or not all(limit is None or type(limit) is int for limit in limits)):
            return None
        return cls(**values)
