"""Once an engine is ready, no kernel is compiled for a request and no graph is dropped; graphs are few.

In a process of its own, where Triton compiles for a GPU that is not there (`ready_script.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recurrent_models import with_idiom

import hf_paged

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pretended GPU would hide the real one")

# Kernels that the first request with an option compiles, by option: options whose steps no dry run looks at, and those
# that are looked at if optional features are. From the seventh set of edits on steps edit in every way so far needed,
# and penalise what biases have made float32.
SAMPLER = {"group_stats_kernel", "_choose_kernel"}
RARE = {
    "n-grams": {"_bar_repeated_ngrams_kernel"}, "suppress": {"_bar_kernel"}, "begin": {"_bar_kernel"},
    "forced": {"_force_kernel"}, "decay": {"_favour_eos_kernel"},
}
BY_FIRST_REQUEST = {
    **RARE, "repetition": {"_penalise_seen_kernel", "_bar_eos_kernel", *SAMPLER},
    "counts": {"_count_kernel", "_penalise_counts_kernel"}, "bad words": {"_add_biases_kernel"},
    "begin": {"_bar_kernel", "_penalise_seen_kernel"}, "raw": {"_token_log_probs_kernel"}, "processed": SAMPLER,
    "masks": {"_mask_tokens_kernel"}, "repetition and processed": SAMPLER,
    "repetition and masks": {"_mask_tokens_kernel"},
}
MOST_GRAPHS = {"plain": 41, "nano": 20}
MOST_UNCAPTURED = {"plain": 84, "nano": 32}  # padded steps that run without a graph
MOST_VARIANTS = {"plain": 35, "optional": 52, "ranks": 56, "adapters": 76}


def served(folder, *case):
    script, root = Path(__file__).with_name("ready_script.py"), Path(hf_paged.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(root), str(script.parent.parent), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, script, *case], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "FP_FUSION" not in done.stderr  # Triton warns where a launch leaves open whether products and sums are fused
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alike"] == [], "kernels compiled twice for alignments, or for an integer that is 1"
    return found["served"]


@pytest.mark.parametrize("backend", ["hopper", pytest.param("triton", marks=pytest.mark.slow)])
def test_workloads_compile_nothing_and_drop_no_graph(backend, tmp_path):
    """One prompt of 30,000 tokens, or three stop tokens, once cost everybody's graphs."""
    found = served(tmp_path, "plain", backend)
    ready = found.pop("ready")
    assert not any(one["variants"] or one["dropped"] for one in found.values()), found
    captured = {name: sum(one["captured"].values()) for name, one in found.items()}
    uncaptured = {name: one["uncaptured"] for name, one in found.items()}
    assert sum(captured.values()) <= MOST_GRAPHS["plain"] and 0 < captured["nano"] <= MOST_GRAPHS["nano"], captured
    assert sum(uncaptured.values()) <= MOST_UNCAPTURED["plain"] and uncaptured["nano"] <= MOST_UNCAPTURED["nano"]
    assert uncaptured["nano behind 30k"] == uncaptured["nano at last"] == captured["nano at last"] == 0
    assert sum(ready.values()) <= MOST_VARIANTS["plain"] and len(found) == 11


@pytest.mark.parametrize("case", [
    ("80",), pytest.param(("256",), marks=pytest.mark.slow), pytest.param(("80", "adapted"), marks=pytest.mark.slow)])
def test_any_number_of_rows_beside_prompts_is_ready(case, tmp_path):
    """Tiles are chosen by the sizes of graphs: numbers between them once had kernels of their own."""
    found = served(tmp_path, "rows_beside_prompts", *case)
    assert found["numbers"] > 0.9 * int(case[0]), found
    assert not found["rows"]["variants"], found


@pytest.mark.parametrize(("looks_at", "listed"), [
    pytest.param((), BY_FIRST_REQUEST, marks=pytest.mark.slow, id="any"), pytest.param(("optional",), RARE, id="more")])
def test_an_option_compiles_its_own_kernels_at_most_and_drops_no_graph(looks_at, listed, tmp_path):
    """Optional features compile nothing where steps with them are looked at."""
    found = served(tmp_path, "options", *looks_at)
    ready = found.pop("ready")
    needed = {name: set(one["variants"]) for name, one in found.items()}
    unlisted = {name: kernels - listed.get(name, set()) for name, kernels in needed.items()}
    assert not any(unlisted.values()), unlisted
    assert not any(one["dropped"] for one in found.values()), found
    assert needed["plain"] == needed["plain again"] == set()
    assert sum(ready.values()) <= MOST_VARIANTS["optional" if looks_at else "plain"]


@pytest.mark.slow
def test_guesses_of_few_requests_are_ready(tmp_path):
    """Steps with guesses have more rows than requests, up to 128."""
    found = served(tmp_path, "guesses")
    del found["ready"]
    assert not any(one["variants"] or one["dropped"] or one["eager"] for one in found.values()), found
    assert len(found) == 2


@pytest.mark.slow
def test_ranks_are_ready_and_come_to_the_same_collectives_whatever_they_miss(tmp_path):
    """Dry runs come to no collective, so that a rank may look at more of them, or earlier, than another."""
    found = served(tmp_path, "ranks")
    first, second = found["rank 0"], found["rank 1"]
    assert second.pop("ready") == {}, "a rank's kernels are the other one's"
    ready = first.pop("ready")
    assert {"_all_reduce_kernel", "_all_reduce_add_rms_norm_kernel", "_best_of_shard_kernel"} < ready.keys()
    assert sum(ready.values()) <= MOST_VARIANTS["ranks"]
    assert first["collectives"] == second["collectives"] and first.pop("collectives") and second.pop("collectives")
    assert first.pop("dry") == second.pop("dry") == []
    assert not any(one["variants"] or one["dropped"] for rank in (first, second) for one in rank.values()), found
    assert len(first) == 5


@pytest.mark.slow
def test_experts_are_ready(tmp_path):
    """A step with prompts is captured at its third use, which comes in the third run."""
    found = served(tmp_path, "moe")
    del found["ready"]
    assert not found.pop("prompts of any length")
    assert not any(one["variants"] or one["dropped"] for one in found.values()) and len(found) == 4
    assert found["first"]["captured"] and found["fourth"]["captured"] == {} and found["fourth"]["uncaptured"] == 0


@pytest.mark.parametrize("family", ["gemma2", pytest.param("glm4", marks=pytest.mark.slow)])
def test_derived_classes_are_ready(family, tmp_path):
    """Their norms, gated MLPs and RoPE are kernels in decode steps and in prompts of any length."""
    found = served(tmp_path, "derived", family)
    ready = found.pop("ready")
    assert {"_rms_norm_kernel", "_rotary_kernel"} - ({"_rotary_kernel"} if family == "glm4" else set()) <= set(ready)
    assert not found.pop("prompts of any length")
    assert not any(one["variants"] or one["dropped"] for one in found.values()) and len(found) == 4


@with_idiom
@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2", *(
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("Qwen3Next", "NemotronH", "Mamba2", "Jamba", "Lfm2Moe", "GraniteMoeHybrid"))])
def test_models_with_states_are_ready(name, tmp_path):
    """Prompts of any length, which no graph holds: one by one, or packed. Each workload of `workloads.py` runs."""
    found = served(tmp_path, "states", name)
    ready = found.pop("ready")
    assert found.pop("prompts of any length") == []
    assert not any(one["variants"] or one["dropped"] for one in found.values()), found
    assert len(found) == 14 and found["nano"]["captured"] and found["long"]["eager"]
    assert "_grouped_kernel" not in ready, "rows of such models share no tiles"


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_adapters_are_ready_by_name_too(dtype, tmp_path):
    found = served(tmp_path, "adapters", dtype, "3")
    assert found["active"]["variants"] == found["named"]["variants"] == {}
    assert found["active"]["dropped"] == found["named"]["dropped"] == {}
    assert sum(found["ready"].values()) <= MOST_VARIANTS["adapters"] and "_shrink_kernel" in found["ready"]


@pytest.mark.slow
def test_calls_under_autocast_are_ready(tmp_path):
    found = served(tmp_path, "autocast")
    assert found["first"]["variants"] == found["second"]["variants"] == found["second"]["dropped"] == {}


@pytest.mark.slow
def test_a_look_at_some_layers_finds_what_all_layers_launch(tmp_path):
    """Dry runs leave out layers that are like others: kernels must not depend on a layer's number."""
    few, every = (served(tmp_path, "adapters", "bfloat16", number, "all")["ready"] for number in ("4", "28"))
    assert few == every


def test_a_second_process_begins_with_the_kernels_of_the_first(tmp_path):
    """Rare options among them; what the file says of kernels goes through Triton, which makes their keys."""
    options = "n-grams", "forced", "decay"
    first = served(tmp_path, "manifest")
    assert first["known"] == [] and first["is done"]
    assert all(first[name]["variants"] for name in options)
    file, = (tmp_path / "hf_paged").iterdir()
    written = json.loads(file.read_text())
    wrong = [written["variants"][0].replace("hf_paged", "nowhere"), "{", '["hf_paged.config:fields", [], {}]', "[1, 2]"]
    file.write_text(json.dumps(written | {"variants": [*wrong, *written["variants"]]}))
    second = served(tmp_path, "manifest")
    assert [name for name in options if second[name]["variants"]] == [] and second["known"]


def test_what_a_request_waited_for_is_all_that_it_launches(tmp_path):
    found = served(tmp_path, "waits")
    for name in ("repetition", "counts", "raw"):
        missing, compiled = found[f"{name}: missing"]
        assert missing == compiled > 0 and found[name]["variants"] == {}, name
