"""Cases of the core tier have each value of each parameter, and collecting them computes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tiers import covering

SUITE = """
import pytest

@pytest.mark.each_value
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y", pytest.param("z", marks=pytest.mark.slow)])
@pytest.mark.parametrize("c", [pytest.param(0, marks=pytest.mark.gpu), 0])
def test_product(a, b, c): pass

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_others(a, b): pass

@pytest.mark.each_value
def test_alone(): pass
"""


def test_few_cases_have_all_values():
    values = {case: set(enumerate(case)) for case in product("ab", "cde", "fghi")}
    found = list(covering(values))
    assert set().union(*(values[case] for case in found)) == set().union(*values.values())
    assert len(found) == 4


def test_other_cases_become_slow(pytester):
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nmarkers = slow\n gpu\n each_value\n")
    options = ["-p", "tiers", "-p", "no:randomly", "-q", "-k", "product or others or alone"]
    pytester.runpytest(*options, "-m", "not slow and not gpu").assert_outcomes(passed=2 + 4 + 1, deselected=10)
    pytester.runpytest(*options, "-m", "slow and not gpu").assert_outcomes(passed=4, deselected=13)


# Of tests/support.py and of transformers: what makes a model, or runs one.
COMPUTES = {"tiny_model", "stock_copy", "stock_generate", "generate", "from_pretrained", "enable"}


def computed_at_import(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if called in COMPUTES:
            yield f"line {node.lineno}: {called}"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        children = node.decorator_list
    else:
        children = [] if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)
    for child in children:
        yield from computed_at_import(child)


def test_importing_a_test_module_makes_no_model():
    """Each process of the tests would: a model of a module is `functools.cache(tiny_model)`, or a fixture."""
    folder = Path(__file__).parent
    found = {str(path.relative_to(folder)): calls for path in folder.rglob("*.py")
             if (calls := list(computed_at_import(ast.parse(path.read_text()))))}
    assert not found
    example = "X = tiny_model()\n@mark(enable(y))\ndef f(): generate()\ng = cache(lambda: generate())"
    assert list(computed_at_import(ast.parse(example))) == ["line 1: tiny_model", "line 2: enable"]
