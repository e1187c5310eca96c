"""Every mutation of tools/ can be carried out: `mutate.py`, which runs them, takes too long to be one of the tests."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parents[2]


def _texts(mutations, package):
    return {(m.file, m.old): (ROOT / package / m.file).read_text().count(m.old) for m in mutations}


def test_the_text_of_each_occurs_once(tool):
    found = _texts(tool("package_mutations").PACKAGE_MUTATIONS, "hf_paged")
    found |= _texts(tool("mutations").MUTATIONS, "hf_paged/scheduler")
    assert {key: count for key, count in found.items() if count != 1} == {}


def test_a_file_with_one_of_them_is_still_python(tool):
    """A test that fails because a file cannot be read says nothing of the tests."""
    of = {"hf_paged": tool("package_mutations").PACKAGE_MUTATIONS, "hf_paged/scheduler": tool("mutations").MUTATIONS}
    broken = []
    for package, mutations in of.items():
        for m in mutations:
            try:
                ast.parse((ROOT / package / m.file).read_text().replace(m.old, m.new, 1))
            except SyntaxError as error:
                broken.append((m.file, m.old, error.msg))
    assert broken == []


def test_the_tests_of_each_are_there(tool):
    files = {m.test_file for m in tool("package_mutations").PACKAGE_MUTATIONS}
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []


def test_each_is_looked_for_by_a_test_of_the_core_tier(tool, request):
    """The session holds what `make test` runs. Whether such a test notices the mutation, `mutate.py` shows."""
    items = defaultdict(list)
    for item in request.session.items:
        items[str(item.path.relative_to(ROOT / "tests"))].append(item)
    mutations = tool("package_mutations").PACKAGE_MUTATIONS
    if missing := {m.test_file for m in mutations} - set(items):
        pytest.skip(f"the session is a part of the suite: it has none of {len(missing)} files, {min(missing)} for one")
    matchers = {name: [KeywordMatcher.from_item(item) for item in some] for name, some in items.items()}
    unseen = [f"{m.test_file} -k {m.tests!r}" for m in mutations
              if not any(map(Expression.compile(m.tests).evaluate, matchers[m.test_file]))]
    assert unseen == []


def test_no_name_is_given_twice(tool):
    """A second list of a name would put the first one out of force."""
    tree = ast.parse(Path(tool("package_mutations").__file__).read_text())
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = Counter(node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
    assert [name for name, count in names.items() if count > 1] == []
