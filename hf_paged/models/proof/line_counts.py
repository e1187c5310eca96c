"""Lines of modeling files that ran in this thread, counted by a trace function."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from hf_paged.models.proof.lengths import is_length


def modeling_files(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the files with the classes of a model's modules and with their base classes of models, without torch's."""
    own = {type(module) for module in modules}
    bases = {base for kind in own for base in kind.__mro__ if not _is_shared(base)}
    return frozenset(file for kind in own | bases if not kind.__module__.startswith("torch.")
                     and (file := _file_of(kind)))


def _is_shared(kind: type) -> bool:
    """Return whether a class is of the code that all models of transformers share."""
    return kind.__module__.startswith("transformers.") and not kind.__module__.startswith("transformers.models.")


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):  # a class of Python itself
        return None


class LineCounts:
    """Counts of the lines of some files that ran: `counts[file, line]`, and arguments that calls of functions gave."""

    def __init__(self, files: frozenset[str]) -> None:
        self.files, self.counts = files, Counter[tuple[str, int]]()
        # By the first line of a function: the arguments that calls gave, and of them those that were no empty dict.
        self._given: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.filled: dict[tuple[str, int], set[str]] = defaultdict(set)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count lines in a ``with`` block, and put back the thread's trace function behind it."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def add(self, other: LineCounts) -> None:
        """Count what another one counted as well."""
        self.counts.update(other.counts)
        for mine, others in ((self._given, other._given), (self.filled, other.filled)):
            for place, names in others.items():
                mine[place] |= names

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self.files:
            return None
        given = {name: value for name, value in frame.f_locals.items() if value is not None}
        self._given[code.co_filename, code.co_firstlineno].update(given)
        self.filled[code.co_filename, code.co_firstlineno].update(
            name for name, value in given.items() if type(value) is not dict or value)
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.counts[frame.f_code.co_filename, frame.f_lineno] += 1
        return self._on_line

    def ran(self, file: str, node: ast.stmt | ast.expr) -> int:
        return self.counts[file, node.lineno]

    def not_given(self, file: str, function: ast.FunctionDef) -> tuple[set[str], set[str]]:
        """Return the arguments of a function that ran, None by default, that were so in each call, and those that were
        None or an empty dict."""
        arguments = function.args
        places = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        defaults = [*arguments.defaults, *arguments.kw_defaults]
        optional = zip(places[len(places) - len(defaults):], defaults, strict=True)
        names = {one.arg for one, default in optional if isinstance(default, ast.Constant) and default.value is None}
        key = file, min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        return names - self._given.get(key, names), names - self.filled.get(key, names)

    def lengths(self) -> set[int]:
        """Return literals that may be lengths: in functions that ran, in `__init__`s, and in classes and the file."""
        values: set[Any] = {node.value for file in self.files for part in self._read(file) for node in ast.walk(part)
                            if isinstance(node, ast.Constant)}
        return {int(value) for value in values if is_length(value)}

    def _read(self, file: str) -> Iterator[ast.AST]:
        tree = parsed(file)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef)):
                yield from (inner for inner in node.body if isinstance(inner, (ast.Assign, ast.AnnAssign)))
            elif isinstance(node, ast.FunctionDef) and (
                    node.name == "__init__" or any(self.ran(file, line) for line in node.body)):
                yield from (*node.body, *node.args.defaults, *filter(None, node.args.kw_defaults))


@functools.lru_cache(maxsize=16)
def parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())
