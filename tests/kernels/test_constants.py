"""Shapes that kernels take as one argument: each field is a constant to Triton's compiler, on every version of it."""

import ast
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_paged.kernels import _triton

triton = pytest.importorskip("triton")
tl = triton.language
PACKAGE = Path(_triton.__file__).parent


class Sizes(NamedTuple):
    rows: int
    wide: bool


class Others(NamedTuple):
    columns: int
    narrow: bool


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    _triton.constants.cache_clear()
    yield
    _triton.constants.cache_clear()


def test_a_field_is_a_constant_and_the_tuple_what_it_was():
    made = _triton.constants(Sizes(16, True))
    assert isinstance(made.rows, tl.constexpr) and isinstance(made.wide, tl.constexpr)
    assert (made.rows.value, made.wide.value) == (16, True)
    assert made == Sizes(16, True) and hash(made) == hash(Sizes(16, True))
    assert made is _triton.constants(Sizes(16, True))


def test_equal_tuples_of_other_classes_keep_their_names():
    assert _triton.constants(Sizes(16, True)).rows.value == 16
    assert _triton.constants(Others(16, True)).columns.value == 16


def test_a_process_that_compiles_gets_constants():
    made = pickle.loads(pickle.dumps(_triton.constants(Sizes(4, False))))
    assert isinstance(made.rows, tl.constexpr) and made == Sizes(4, False)


def test_the_interpreter_gets_plain_numbers(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    _triton.constants.cache_clear()
    assert _triton.constants(Sizes(4, False)).rows == 4 and type(_triton.constants(Sizes(4, False)).rows) is int


def test_every_launch_hands_shapes_on_as_constants():
    """Triton 3.6, which runs on no machine without a GPU here, takes no plain number as a size of a tensor."""
    found = 0
    for path in [path for path in PACKAGE.rglob("*.py") if "hopper" not in path.parts]:
        for node in ast.walk(ast.parse(path.read_text())):
            given = {word.arg: word.value for word in node.keywords} if isinstance(node, ast.Call) else {}
            if isinstance(node, ast.Dict):
                given = {key.value: value for key, value in zip(node.keys, node.values, strict=True)
                         if isinstance(key, ast.Constant)}
            for name in given.keys() & {"S", "L", "N", "C"}:
                found += 1
                assert isinstance(given[name], ast.Call) and ast.unparse(given[name].func) == "constants", (path, name)
    assert found >= 8
