"""PTX as lists of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

BYTES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "tf32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8}
_LABEL = re.compile(r"^(\$?\w+):\s*(.*)$")
_GUARDED = re.compile(r"^@(!?)(%\w+)\s+(.*)$")
_OPERANDS = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*)")


class Fault(Exception):
    """What a GPU would not do, or what would have another result from time to time."""


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        guard, is_negated: of which threads run it: the predicate's name, or None.
        words: the parts of its name: ``("ld", "global", "v4", "b32")``.
        operands: as they are written.
        text: the whole line.
    """

    guard: str | None
    is_negated: bool
    words: tuple[str, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def kind(self) -> str:
        return self.words[-1]


class Program(NamedTuple):
    """A kernel: its instructions, and where each label stands."""

    instructions: list[Instruction]
    labels: dict[str, int]


def parts(operand: str) -> list[str]:
    """Return the registers of ``{a, b}``, or the single one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def parse(text: str) -> Program:
    """Read the one kernel of a module."""
    body = text[text.index(".entry"):]
    lines = body[body.index("{", body.index(")")) + 1:].splitlines()
    program = Program([], {})
    for line in lines:
        line = line.split("//")[0].strip()
        if line.startswith("}"):
            break
        if found := _LABEL.match(line):
            program.labels[found[1]], line = len(program.instructions), found[2]
        if not line.startswith("."):
            program.instructions.extend(_instruction(part.strip()) for part in line.split(";") if part.strip())
    return program


def _instruction(text: str) -> Instruction:
    guarded = _GUARDED.match(text)
    name, *rest = (guarded[3] if guarded else text).split(None, 1)
    operands = tuple(part.strip() for part in _OPERANDS.findall(rest[0])) if rest else ()
    return Instruction(guarded[2] if guarded else None, bool(guarded and guarded[1]), tuple(name.split(".")), operands,
                       text)
