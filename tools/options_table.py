"""Write docs/options.md from the table that decides what is native.

    python tools/options_table.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated_page import write_or_check
from transformers import GenerationConfig

from hf_paged.options.request_spec import PLAIN
from hf_paged.options.table import ARGUMENT, INERT, NATIVE, OPTIONS, option_of

PATH = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = """# Generation options

This page says which options of `model.generate` run natively, made by `python tools/options_table.py` from the table
that decides, `hf_paged/options/table.py`.

A call of an enabled model takes one of three paths ([README](../README.md#native-lockstep-stock)). An option with a
neutral value never decides; `None` is always neutral, and `False` for flags. One option of *lockstep* takes the call to
lockstep, one of *stock* to stock with a `FallbackWarning` (`strict=True` raises `FallbackError`). `PagedGenerator` (but
for tensors) and `Engine` raise `UnsupportedOptionError` for both. An option that is not listed counts as *stock*.

## Exceptions

* **Processors and criteria as objects.** Those of transformers are native where they say what native options say, in an
  order that makes no difference: `logits_processor=[TemperatureLogitsWarper(0.7)]` of a sampling call,
  `stopping_criteria=[StopStringCriteria(tokenizer, ["END"])]`. Subclasses, two of a kind, your own ones, and
  `prefix_allowed_tokens_fn` run in lockstep.
* **Arguments.** A `streamer` is native, and so are arguments that stock's decoding ignores (`labels`,
  `num_items_in_batch`). These go to stock: `assistant_model`, a cache (`past_key_values`, `cache`), `inputs_embeds`,
  `position_ids` other than stock's, `synced_gpus=True`, `custom_generate`, `cache_implementation="paged"`, an
  `attention_mask` with holes or right padding, lengths beyond the model's positions or the KV pool, and in lockstep
  rows that do not fit into the pool all at once.
* **`return_dict_in_generate`** is native. The cache of the result is computed when it is first used, with the model as
  it was in the call, or raises.
* **Rows that meet in stock** run in lockstep: `no_repeat_ngram_size` with left padding, banned or biased sequences that
  hold the padding token, `stop_strings` and `max_time` for several rows without EOS.
* **`prompt_lookup_num_tokens`** makes [guesses](design/guesses.md), which change no token, also for several rows, which
  stock refuses. Beside an option of lockstep, `stop_strings`, `max_time` or `structured` one row runs in lockstep with
  stock's own drafts. A `PagedGenerator` and an `Engine` guess nothing beside `structured`.
* **`adapter_names`** of PEFT's `generate` runs as the other options do, and with `return_dict_in_generate=True` in
  lockstep ([adapters.md](adapters.md)).

[troubleshooting.md](troubleshooting.md) has the states of a model that send its calls to stock.
"""
NATIVE_TABLE = """
## Native

| option | default | neutral |
|---|---|---|
"""
WITHOUT_EFFECT = """Without an effect in greedy search and sampling, whatever the value: """
LOCKSTEP_TABLE = """
## Native in lockstep

| option | default | neutral |
|---|---|---|
"""
STOCK = """
## Stock

"""
OWN = """
## Arguments of hf_paged

`PagedGenerator.generate` and `.stream` and `Engine.add_request` take these besides ([api.md](api.md)); `model.generate`
refuses them. In a generator's call a list has a value for each prompt.

"""
# Values of native options with which stock makes no processor; of the others None is such a value, or they have none.
OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "renormalize_logits": False, "remove_invalid_values": False,
}


def options() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield name, path and neutral values of every option, as the package's table has them."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names |= {option.name for option in OPTIONS.values() if option.path != ARGUMENT}
    for option in map(option_of, sorted(names)):
        if option.path in (NATIVE, INERT):
            yield option.name, option.path, (OFF[option.name],) if option.name in OFF else ()
        elif option.name == "return_dict_in_generate":
            yield option.name, NATIVE, ()
        else:
            yield option.name, option.path, option.neutral


def render() -> str:
    """Return the whole page."""
    listed = list(options())
    defaults = GenerationConfig()._get_default_generation_params()  # what stock takes where a model says nothing

    def neutral_of(values: tuple[Any, ...]) -> list[str]:
        return [f"`{value!r}`" for value in values if value is not None and value is not False]

    def rows(path: str) -> str:
        return "".join(f"| `{name}` | `{defaults.get(name)!r}` | {', '.join(neutral_of(neutral))} |\n"
                       for name, its_path, neutral in listed if its_path == path)

    def names(path: str) -> list[str]:
        return [f"`{name}`" + (f" (neutral: {', '.join(shown)})" if (shown := neutral_of(neutral)) else "")
                for name, its_path, neutral in listed if its_path == path]

    def sentence(parts: list[str], start: str = "") -> str:
        return textwrap.fill(f"{start}{', '.join(parts)}.", 120) + "\n"

    own = [f"`{name}={value!r}`" for name, value in PLAIN.items()]
    return "".join((HEAD, NATIVE_TABLE, rows(NATIVE), "\n", sentence(names(INERT), WITHOUT_EFFECT), LOCKSTEP_TABLE,
                    rows("lockstep"), STOCK, sentence(names("stock")), OWN, sentence(own)))


def main() -> int:
    return write_or_check(PATH, render, __doc__)


if __name__ == "__main__":
    sys.exit(main())
