"""The pages that tools make are current, and what the others name is there."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
from support import batch, tiny_model
from transformers import GenerationConfig

import hf_paged

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
A_FILE = re.compile(r"`(?:python )?((?:\w+/)+[\w.]*\w(?:\.(?:py|md|sh|json|jsonl|toml)|/))[`: ]")
A_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@pytest.mark.parametrize("name", ["options_table", "api_docs", "layers_picture", "server_fields", "models_page"])
def test_the_committed_page_is_what_its_tool_makes_of_the_code(tool, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    assert tool(name).main() == 0, f"run: python tools/{name}.py"


def test_every_public_name_is_in_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in hf_paged.__all__ if not re.search(rf"^### `{name}\b", page, re.M)] == []


def test_the_api_page_documents_a_keyword_once_and_every_field_of_a_config(tool):
    page = (ROOT / "docs" / "api.md").read_text()
    names = tool("api_docs").SHARED
    assert len(names) > 20 and [name for name in names if page.count(f"`{name}=") + page.count(f", {name}=") < 1] == []
    assert page.count("distribution from which it was drawn") == 1
    fields = page.partition("### `PagedConfig`")[2].partition("\n### ")[0]
    settings = [f"`{one.name}={one.default!r}" for one in dataclasses.fields(hf_paged.PagedConfig)]
    assert [one for one in settings if one not in fields] == []


def test_every_reason_for_stock_is_in_the_troubleshooting_page(tool):
    reasons = tool("reasons")
    remedies, others = reasons.found()
    assert len(remedies) > 80 and len(others) > 20
    assert reasons.missing() == []


def test_a_remedy_that_stands_beside_another_reason_is_missing(tool):
    reasons = tool("reasons")
    page = reasons.PAGE.read_text()
    assert reasons.missing(page.replace("parametrizations` ends it.", "parametrizations` ends them.")) == [
        "`… is parametrized`: `torch.nn.utils.parametrize.remove_parametrizations` ends it."
    ]


def test_what_the_troubleshooting_page_shows_of_a_reason(tool):
    """A part of its text that tells it from others, and one sentence of its remedy."""
    reasons = tool("reasons")
    assert reasons.items("* `a b`, `c` (d): E: f.\n* plain: g.\n* `h`: i.") == [(["a b", "c"], "E: f."), (["h"], "i.")]
    assert reasons.is_part("row … failed", "row … failed: …") and reasons.is_part("it is a …", "it is a …")
    assert not reasons.is_part("failed", "row … failed: …") and not reasons.is_part("row … ended", "row … failed: …")
    assert reasons.sentences("A `b.c` is d. Give `e`.") == ["A `b.c` is d.", "Give `e`."]


def test_neutral_values_in_the_options_page_are_stocks_defaults(tool):
    """A `top_k` that is not given is 50 in stock, which is not neutral."""
    defaults = GenerationConfig()._get_default_generation_params()
    neutral = tool("options_table").OFF
    assert [name for name, value in neutral.items() if defaults.get(name, value) != value] == ["top_k"]


def test_where_reasons_are_found(tool):
    source = """
SHARED = "Turn it " + "off."
def why(a) -> str | None:
    if a: return f"{a} has a " + "hook"
    return None if a is None else f"odd {a}"
def name(a) -> str: return "no reason"
def rows(a) -> list[int] | str:
    yield "no rows of it"
def reason(a) -> Reason | None:
    return Reason(f"{a}={{}} of {{0}}", a, remedy=SHARED) or Reason("plain", remedy=f"Not {a}.")
"""
    tree, reasons = ast.parse(source), tool("reasons")
    assert set(reasons.texts_of(tree)) == {"… has a hook", "odd …", "no rows of it"}
    constants = reasons.constants_of([tree])
    assert set(reasons.reasons_of(tree, constants)) == {("…=… of …", "Turn it off."), ("plain", "Not ….")}
    with pytest.raises(ValueError, match="expected literals"):
        list(reasons.reasons_of(ast.parse("Reason(text, remedy='Do.')"), {}))


def test_what_the_picture_of_layers_counts_as_an_import(tool):
    source = """
from a.b import c
import d.e
if TYPE_CHECKING:
    from not_this import one
def late():
    from f import g
"""
    assert list(tool("layers_picture").imported(ast.parse(source))) == ["a.b.c", "d.e", "f.g"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_that_a_page_names_is_there(page):
    """Paths are relative to the repository or to the package."""
    named = {path for path in A_FILE.findall(page.read_text()) if not path.startswith("figures/")}
    assert sorted(path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "hf_paged"))) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in ("architecture.md", "extending.md")],
                         ids=lambda page: page.name)
def test_every_name_that_a_page_on_the_code_mentions_is_in_the_code(page):
    sources = [path.read_text() for folder in ("hf_paged", "tests", "tools", "benchmarks")
               for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    named = re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"(?s)```.*?```", "", page.read_text()))
    parts = {part for name in named if not name.endswith((".py", ".md", ".toml")) for part in name.split(".")}
    assert sorted(parts - words) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_of_a_page_leads_somewhere(page):
    for target, heading in A_LINK.findall(page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in anchors, f"{page.name}: {target}#{heading}"


# Files of the walk that a greedy call of a Qwen3 on a CPU passes by: other paths, other families, CUDA, other callers.
PASSED_BY = {
    "device/virtual_memory.py", "engine/driver.py", "engine/lockstep.py", "engine/features/stop_rules.py",
    "engine/weight_access.py", "integration/async_calls.py", "integration/enable.py", "integration/explain.py",
    "integration/pretrained.py", "integration/requests.py", "integration/stock_loop.py", "kernels/attention/decode.py",
    "kernels/attention/grouped.py", "kernels/attention/prefill.py",
    "kernels/build/compiling.py", "kernels/hopper/prefill.py", "kernels/layer/add_rms_norm.py",
    "models/one_launch.py", "runner/dry_runs.py", "runner/graphs.py", "runner/padded_steps.py",
    "sampling/sample_tokens.py",
}


def test_a_call_enters_the_files_that_the_life_of_a_request_names():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`(\w+/[\w/]+\.py)`", page[page.index("## The life") : page.index("## Glossary")]))
    model = hf_paged.enable(tiny_model(), strict=True)
    package = str(Path(hf_paged.__file__).parent) + "/"
    entered = set()
    sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_filename.removeprefix(package)))
    try:
        model.generate(**batch([50, 19]), max_new_tokens=3)
    finally:
        sys.setprofile(None)
    assert sorted(named - entered - PASSED_BY) == []
    assert len(named & entered) > 20 and named >= PASSED_BY


def test_the_readme_installs_what_the_package_asks_for():
    """An install line with other bounds would let pip replace torch's CPU build by one with gigabytes of CUDA."""
    project, readme = (ROOT / "pyproject.toml").read_text(), (ROOT / "README.md").read_text()
    [torch_wanted] = re.findall(r'^  "(torch>=[^"]*)",', project, re.M)
    assert f'pip install "{torch_wanted}" --index-url https://download.pytorch.org/whl/cpu' in readme
    first, end = (int(version.split(".")[1]) for version in re.findall(r"\d+\.\d+", torch_wanted))
    assert f"torch 2.{first} to 2.{end - 1}" in " ".join(readme.split())
    [oldest] = re.findall(r'^  "transformers>=([\d.]+),', project, re.M)
    assert f"transformers {oldest} to" in " ".join(readme.split())
    pinned = re.search(r"^TORCH \?= torch==2\.(\d+)", (ROOT / "Makefile").read_text(), re.M)
    assert first <= int(pinned.group(1)) < end
