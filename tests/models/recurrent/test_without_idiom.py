"""A transformers whose layers ask no other cache for states: models with a recurrent state run in stock."""

from __future__ import annotations

from recurrent_models import recurrent_model
from support import assert_same_tensor, batch, stock_generate

import hf_paged
from hf_paged.models.proof import prove
from hf_paged.models.recurrent import view


def test_a_model_with_states_runs_in_stock(monkeypatch, recwarn, tmp_path):
    monkeypatch.setattr(view, "HAS_IDIOM", False)
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))  # without verdicts that were made with it
    model = recurrent_model("Lfm2")
    assert "asks no other cache" in prove(model).reason
    kwargs = {**batch([9, 4]), "max_new_tokens": 3}
    expected = stock_generate(model, **kwargs)
    hf_paged.install()
    try:
        assert_same_tensor(model.generate(**kwargs), expected)
        assert not hf_paged.is_enabled(model)
    finally:
        hf_paged.uninstall()
    assert "keeps a recurrent state, which steps under transformers" in str(hf_paged.explain(model, **kwargs))
