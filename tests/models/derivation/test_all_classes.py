"""Every causal LM class of transformers: natively with stock's tokens and log-probabilities, or by stock."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from derived_models import assert_scored_as_stock
from packaging.version import Version
from support import assert_native_parity, assert_same_tensor, batch, random_prompts, stock_generate
from tiny_configs import NOT_MADE, SLOWLY_PROVED, tiny_class_model

import hf_paged
from hf_paged import PagedGenerator
from tools.model_verdicts import class_names, image_text_names

ACCEPTED = json.loads((Path(__file__).parents[1] / "proof" / "verdicts.json").read_text())
NATIVE = [name for name, verdict in ACCEPTED["classes"].items() if verdict["outcome"] == "proved"]
OTHERS = [name for name in ACCEPTED["classes"] if name not in {*NATIVE, *NOT_MADE, *SLOWLY_PROVED}]
SETTINGS = {"strict": True, "max_num_batched_tokens": 19, "max_num_seqs": 6}

of_this_version = pytest.mark.skipif(
    ACCEPTED["transformers"] != transformers.__version__,
    reason=f"the verdicts are about transformers {ACCEPTED['transformers']}: run tools/model_verdicts.py --write")


@pytest.mark.skipif(Version(transformers.__version__) < Version(ACCEPTED["transformers"]),
                    reason="an older transformers than that of the verdicts")
def test_every_class_of_transformers_has_a_verdict():
    for found, known in (class_names(), "classes"), (image_text_names(), "image_text"):
        assert set(found) == set(ACCEPTED[known]), "run tools/model_verdicts.py --write, and tools/models_page.py"


@of_this_version
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", NATIVE)
def test_a_class_runs_natively(name, number):
    """Rows longer than windows and chunks, in several chunks, beside each other, in sizes that no proof has."""
    model = hf_paged.enable(tiny_class_model(name, number), **SETTINGS)
    assert_native_parity(model, **batch([30, 17, 40, 9]), max_new_tokens=12)
    hf_paged.disable(model)
    with PagedGenerator(model, **SETTINGS) as generator:
        completions = generator.generate(random_prompts([33, 5]), max_new_tokens=4, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(model, completion)


@of_this_version
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_class_gives_stocks_result(name):
    """By stock, with one warning, or natively where the default config alone is not proved."""
    model, call = tiny_class_model(name, 0), {**batch([9, 4]), "max_new_tokens": 3, "do_sample": False}
    expected = stock_generate(model, **call)
    hf_paged.install()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", hf_paged.FallbackWarning)
            assert_same_tensor(model.generate(**call), expected)
        is_native = hf_paged.is_enabled(model)
        hf_paged.disable(model)
    finally:
        hf_paged.uninstall()
    reasons = [str(one.message) for one in caught if one.category is hf_paged.FallbackWarning]
    assert len(reasons) == (not is_native) and "is patched" not in "".join(reasons)
    torch.testing.assert_close(model.generate(**call), expected)
