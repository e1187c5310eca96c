"""Copies of Llama's modeling file with a change, loaded as modules of their own, and the table of such changes."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

_number = itertools.count()

# Where a change goes: a text of the file that occurs once, and the change's place in it.
ATTENTION_INIT = ("        self.is_causal = True\n", "{0}{change}")
ATTENTION = (
    "        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)\n", "{0}{change}")
BEHIND_CACHE = ("        attention_interface: Callable = ", "{change}{0}")
BEHIND_ATTENTION = ("        attn_output = attn_output.reshape(*input_shape, -1).contiguous()\n", "{change}{0}")
ARGUMENT = ("            scaling=self.scaling,\n", "{0}{change}")
MLP_INIT = ("        self.act_fn = ACT2FN[config.hidden_act]\n", "{0}{change}")
MLP = ("    def forward(self, x):\n        down_proj =", "    def forward(self, x):\n{change}        down_proj =")
BEFORE_MASK = ("        causal_mask = create_causal_mask(", "{change}{0}")
EMBEDDED = ("        hidden_states = inputs_embeds\n", "{0}{change}")
LOGITS = ("        logits = self.lm_head(hidden_states)\n", "{0}{change}")


class Change(NamedTuple):
    """A change of Llama, and the verdict that it gets."""

    name: str
    outcome: str
    reason: str = ""  # a part of it
    edits: tuple[tuple[tuple[str, str], str], ...] = ()  # of places, with lines of code
    config: Mapping[str, Any] = MappingProxyType({})
    max_length: int | None = None
    replace: tuple[str, str] | None = None  # text that is replaced wherever it occurs


def small_llama(**overrides: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    }
    return LlamaConfig(**(settings | overrides))


def planted(change: Change, folder: Path) -> type:
    """Return the causal LM class of a copy of Llama's file with a change."""
    source = inspect.getsource(modeling_llama)
    for (text, into), code in change.edits:
        assert source.count(text) == 1, text
        lines = "".join(f"{line}\n" for line in code.split("\n"))
        source = source.replace(text, into.format(text, change=lines))
    if change.replace is not None:
        assert change.replace[0] in source
        source = source.replace(*change.replace)
    return load_copy(source, "llama", folder).LlamaForCausalLM


def load_copy(source: str, model_type: str, folder: Path) -> Any:
    """Return the module of a modeling file's changed source, loaded from a file of a name of its own."""
    source = re.sub(r"from \.\.\. import", "from transformers import", source)
    source = re.sub(r"from \.\.\.", "from transformers.", source)
    source = source.replace("from .configuration_", f"from transformers.models.{model_type}.configuration_")
    name = f"planted_{next(_number)}"
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for decorators that look up a class's module
    spec.loader.exec_module(module)
    return module


def _code(text: str, spaces: int = 8) -> str:
    return "\n".join(" " * spaces + line for line in text.split("\n"))


def _mlp(text: str) -> tuple[tuple[tuple[str, str], str], ...]:
    return ((MLP, _code(text)),)


def _capacity(tokens: str) -> str:
    return ("bins = (x[..., :4].argmax(-1, keepdim=True) == torch.arange(4, device=x.device)).long()\n"
            f"place = (bins.cumsum(1) * bins).sum(-1, keepdim=True)\nx = torch.where(place > {tokens}, 0 * x, x)")


def _temperature(limit: str) -> tuple[tuple[tuple[str, str], str], ...]:
    """Scale queries as Llama 4 does, by positions that are counted from the cache's length."""
    return ((ATTENTION, _code(
        "past = 0 if cache is None else cache.get_seq_length(self.layer_idx)\n"
        "at = past + torch.arange(query_states.shape[2], device=query_states.device)\n"
        f"query_states = query_states * (1 + 0.1 * torch.log1p(torch.floor((at + 1.0) / {limit})))[:, None]")),)


_OTHERS = "depend on the other rows"
_PACKED = "packed logits differ"

FAULTS = (
    Change("batch norm over tokens", "refused", _PACKED, _mlp(
        "x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True, correction=0) + 0.1)")),
    Change("8-bit scale by the largest value", "refused", _PACKED, _mlp(
        "scale = x.abs().amax() / 127\nx = (x / scale).round() * scale")),
    Change("outlier columns over all rows", "refused", "", _mlp(
        "columns = (x.abs() > 6).flatten(0, 1).any(0)\nx = torch.where(columns, x, (x * 64).round() / 64)")),
    Change("halved if any value is large", "refused", _OTHERS, ((EMBEDDED, _code(
        "hidden_states = torch.where((hidden_states.abs() > 1e3).any(), hidden_states * 0.5, hidden_states)")),)),
    Change("mean over rows x 1e-6", "refused", _PACKED, _mlp("x = x + 1e-6 * x.mean(1, keepdim=True)")),
    Change("mean over rows x 1e-9", "refused", "", _mlp("x = x + 1e-9 * x.mean(1, keepdim=True)")),
    Change("previous token", "refused", _PACKED, ((EMBEDDED, _code(
        "hidden_states = hidden_states + 0.1 * nn.functional.pad(hidden_states, (0, 0, 1, -1))")),)),
    Change("one token id reads its neighbour", "refused", _PACKED, ((EMBEDDED, _code(
        "hidden_states = torch.where((input_ids == 99)[..., None], hidden_states.roll(1, 1), hidden_states)")),)),
    Change("one token id is masked", "refused", _PACKED, ((BEFORE_MASK, _code(
        "if cache is None or cache.get_seq_length() == 0:\n    attention_mask = (input_ids != 99).long()")),)),
    Change("dropout in eval mode", "refused", "random numbers", _mlp("x = nn.functional.dropout(x, 0.001, True)")),
    Change("noise", "refused", "random numbers", _mlp("x = x + 1e-6 * torch.randn_like(x)")),
    Change("running mean in a module", "refused", "the second time", (
        (MLP_INIT, _code('self.register_buffer("mean", torch.zeros(()))')),
        *_mlp("self.mean = 0.9 * self.mean + 0.1 * x.mean()\nx = x + 1e-3 * self.mean"))),
    Change("other after 40 calls", "refused", "", (
        (MLP_INIT, _code("self.calls = 0")), *_mlp("self.calls += 1\nif self.calls > 40:\n    x = x * 1.01"))),
    Change("capacity by tokens", "refused", _PACKED, _mlp(_capacity("int(1.25 * x.shape[1] / 4)"))),
    Change("an argument for 3,000 tokens alone", "refused", "counts the tokens", _mlp(
        "def shown(x, image=None):\n    if image is not None and image.sum() > 0:\n        x = x * 2\n    return x\n"
        "x = shown(x, *(torch.ones(1),) * (x.shape[1] > 2999))")),
    Change("an argument for odd tokens alone", "open", "image is not None and image.sum() > 9", _mlp(
        "def shown(x, image=None):\n    if image is not None and image.sum() > 9:\n        x = x * 2\n    return x\n"
        "x = shown(x, *(torch.ones(1),) * (x.shape[1] % 2))")),
    Change("an argument for large models alone", "refused", "other arguments", (
        (MLP_INIT, _code("self.extra = (torch.ones(4),) * (config.hidden_size > 64)")), *_mlp(
            "def shown(x, extra=None):\n    if extra is not None and extra.shape[0] < x.shape[1] - 40000:\n"
            "        x = x * 2\n    return x\nx = shown(x, *self.extra)")), config={"hidden_size": 96}),
    Change("an argument that its function sets", "open", "image is not None and image > 400000", _mlp(
        "def shown(x, image=None):\n    image = x.shape[1] * 7\n    if image is not None and image > 400000:\n"
        "        x = x * 2\n    return x\nx = shown(x)"), max_length=399998),
    Change("capacity of 512", "refused", "counts the tokens", _mlp(_capacity("512"))),
    Change("other code above 4,000 tokens", "refused", "counts the tokens", _mlp(
        "if x.shape[1] > 4000:\n    x = x * 1.001")),
    Change("ALiBi in the mask", "refused", "changed on its way", ((EMBEDDED, _code(
        "slope = -0.1 * torch.arange(causal_mask.shape[-1], device=hidden_states.device, dtype=hidden_states.dtype)\n"
        "causal_mask = torch.where(causal_mask.bool(), slope, float('-inf'))")),)),
    Change("position_bias", "refused", "position_bias", (
        (ARGUMENT, "            position_bias=query_states.new_zeros(1),"),)),
    Change("prefix of 4 keys", "refused", "attends", ((BEHIND_CACHE, _code(
        "key_states = torch.cat([key_states[:, :, :4] * 0 + 1, key_states], 2)\n"
        "value_states = torch.cat([value_states[:, :, :4] * 0 + 1, value_states], 2)")),)),
    Change("every other key", "refused", "attends", ((BEHIND_CACHE, _code(
        "key_states, value_states = key_states[:, :, ::2], value_states[:, :, ::2]")),)),
    Change("keys cut by the module", "refused", "attends", ((BEHIND_CACHE, _code(
        "key_states, value_states = key_states[:, :, -16:], value_states[:, :, -16:]")),)),
    Change("attention beside the interface", "refused", _PACKED, ((BEHIND_ATTENTION, _code(
        "beside = nn.functional.scaled_dot_product_attention(\n    query_states, key_states, value_states,\n"
        "    is_causal=query_states.shape[2] > 1, enable_gqa=True)\n"
        "attn_output = attn_output + 0.1 * beside.transpose(1, 2)")),)),
    Change("positions of its own", "refused", _PACKED, ((BEFORE_MASK, _code(
        "past = 0 if cache is None else cache.get_seq_length()\n"
        "position_ids = past + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]")),)),
    Change("window in the config, and full masks", "refused", "", config={"sliding_window": 20}),
    Change("temperature by cache length, from the config", "proved", "", _temperature(
        "self.config.max_position_embeddings"), {"max_position_embeddings": 2048}, 2046),
    Change("temperature by cache length, from a literal", "proved", "", _temperature("9000"), {}, 8998),
    Change("temperature by cache length, from an attribute", "proved", "", (
        (ATTENTION_INIT, _code("self.limit = 3 * config.max_position_embeddings")), *_temperature("self.limit")),
        {"max_position_embeddings": 2048}, 6142),
    Change("branch on the number of keys", "proved", "", ((BEHIND_CACHE, _code(
        "if key_states.shape[2] > 3000:\n    query_states = query_states * 1.1")),), {}, 2998),
    Change("temperature by cache length, from a product", "open", "cache's length", _temperature(
        "(self.config.max_position_embeddings * 20.5)")),
    Change("dynamic NTK", "proved", max_length=2046, config={
        "max_position_embeddings": 2048, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    Change("longrope", "proved", max_length=998, config={
        "max_position_embeddings": 4000, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 1000}}),
    Change("condition on a weight's values", "refused", "meta tensors", _mlp(
        "if self.gate_proj.weight.abs().max() > 1e6:\n    x = x * 2")),
    Change("values that never occur look across rows", "open", "any at", _mlp(
        "x = torch.where((x.abs() > 1e8).any(), x * 0.5, x)")),
    Change("values that never occur span all rows", "open", "aminmax at", _mlp(
        "low, high = x.aminmax()\nx = torch.where(high - low > 1e8, x * 0.5, x)")),
    Change("mixing in bfloat16 alone", "open", "bfloat16", _mlp(
        "if x.dtype == torch.bfloat16:\n    x = x / x.abs().amax()")),
    Change("mixing on a GPU alone", "open", "is_cuda", _mlp("if x.is_cuda:\n    x = x / x.abs().amax()")),
    Change("cumulative sum", "refused", _PACKED, _mlp("x = x + 1e-4 * x.cumsum(1)")),
    Change("sorted tokens", "refused", _PACKED, _mlp("x = x + 1e-3 * x.sort(1).values")),
    Change("number of rows", "refused", _PACKED, _mlp("x = x * (1 + 0.01 * (x.shape[0] - 1))")),
    Change("every other row by a product x 1e-12", "refused", _OTHERS, _mlp(
        "x = x + 1e-12 * (x @ x.transpose(1, 2)) @ x")),
    Change("the last token of a step", "refused", _PACKED, ((EMBEDDED, _code(
        "hidden_states = torch.cat([hidden_states[:, :-1], hidden_states[:, -1:] * 1.01], 1)")),)),
    Change("mixing in late layers, without a branch", "open", "mean at", ((ATTENTION, _code(
        "late = torch.full((), self.layer_idx >= 40, device=query_states.device)\n"
        "query_states = torch.where(late, query_states.mean(2, keepdim=True), query_states)")),)),
    Change("a head that mixes the rows that it keeps", "refused", _PACKED, ((LOGITS, _code(
        "logits = logits + 0.1 * logits.mean(1, keepdim=True)")),)),
    Change("a state on the cache", "refused", _PACKED, ((ATTENTION, _code(
        'if cache is not None:\n    prior = getattr(cache, "prior", None)\n    if prior is not None:\n'
        "        query_states = query_states + 0.1 * prior\n    cache.prior = query_states[:, :, -1:]")),)),
    Change("a state of one-token calls", "refused", _PACKED, _mlp(
        'if x.shape[1] == 1 and getattr(self, "last", None) is not None:\n    x = x + 0.1 * self.last\n'
        "self.last = x[:, -1:].detach()")),
    Change("a first value that the class keeps", "refused", "other code", _mlp(
        'kept = type(self).__dict__.get("kept")\nif kept is None or kept.device != x.device:\n'
        "    kept = type(self).kept = x.detach().mean()\nx = x + 1e-3 * kept.to(x.dtype)")),
    Change("steps of just 3,000 tokens", "refused", "3000 tokens", _mlp(
        "x = x * (1 + 0.1 * (x.shape[1] % 3000 == 0))")),
    Change("compiled code for more than 9,000 tokens", "open", "looked is compiled", _mlp("x = looked(x)"), replace=(
        "class LlamaMLP(nn.Module):",
        "@torch.jit.script\ndef looked(x: torch.Tensor):\n    if x.size(1) > 9000:\n        x = x * 1.001\n"
        "    return x\n\n\nclass LlamaMLP(nn.Module):")),
    Change("mixing where a local says that a step is long", "open", "is_long", _mlp(
        "is_long = x.shape[1] > 3_000_000\nif is_long:\n    x = x / x.abs().amax()")),
    Change("mixing where a local was set again", "open", "is_long", _mlp(
        "is_long = self.config.pretraining_tp > 7\nis_long = x.shape[1] > 3_000_000\n"
        "if is_long:\n    x = x / x.abs().amax()")),
    Change("compiled code that modules hold", "open", "looked is compiled", (
        (MLP_INIT, _code("self.looked = looked")), *_mlp("x = self.looked(x)")), replace=(
        "class LlamaMLP(nn.Module):",
        "@torch.jit.script\ndef looked(x: torch.Tensor):\n    if x.size(1) > 9000:\n        x = x * 1.001\n"
        "    return x\n\n\nclass LlamaMLP(nn.Module):")),
    Change("steps of just as many tokens as a class says", "refused", "3000 tokens", _mlp(
        "x = x * (1 + 0.1 * (x.shape[1] % self.LIMIT == 0))"), replace=(
        "class LlamaMLP(nn.Module):", "class LlamaMLP(nn.Module):\n    LIMIT = 3000\n")),
    Change("mixing in large models alone", "refused", "other code", _mlp(
        "if self.hidden_size > 2048:\n    x = x / x.abs().amax()"), {"hidden_size": 4096}),
)

CONTROLS = (
    Change("other code with an argument that no call gives", "proved", "", _mlp(
        "def shown(x, image=None, features=None):\n    features = features if features is not None else {}\n"
        "    if isinstance(image, dict) and image.get('x') or not features.get('x') is None and image is not None:\n"
        "        x = x * 2\n"
        "    if features.get('x') or image is not None and image.sum() > 0:\n        x = x * 2\n    return x\n"
        "x = shown(x)")),
    Change("class numbers, checked by torch", "proved", "", _mlp(
        "choice = x[..., :4].argmax(-1)\nchosen = nn.functional.one_hot(choice, num_classes=4)\n"
        "x = x * (1 + 0.1 * chosen[..., :1].to(x.dtype))")),
    Change("scaled logits", "proved", "", ((LOGITS, _code("logits = 0.5 * logits")),)),
    Change("softcap of logits", "proved", "", ((LOGITS, _code("logits = torch.tanh(logits / 30) * 30")),)),
    Change("temperature by position_ids", "proved", "", ((ATTENTION, _code(
        'steps = torch.floor(kwargs["position_ids"] / 100.0)\n'
        "query_states = query_states * (1 + 0.1 * torch.log1p(steps))[:, None, :, None]")),)),
    Change("masks of 20 tokens", "proved", "", config={"sliding_window": 20}, replace=(
        "create_causal_mask", "create_sliding_window_causal_mask")),
    Change("yarn", "proved", config={"max_position_embeddings": 2048, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}}),
    Change("a field that nothing reads", "proved", config={"unread_limit": 777}),
    Change("normed queries", "proved", "", ((ATTENTION, _code(
        "query_states = query_states * torch.rsqrt(query_states.pow(2).mean(-1, keepdim=True) + 1e-6)")),)),
    Change("scaled residual", "proved", replace=(
        "hidden_states = residual + hidden_states", "hidden_states = residual + 0.7 * hidden_states")),
    Change("other code where a local says that the config asks for it", "proved", "", _mlp(
        "is_eager = self.config._attn_implementation == 'eager'\n"
        "if is_eager and self.config.mlp_bias:\n    x = x * 2")),
    Change("clamp in float16", "open", "float16", _mlp(
        "if x.dtype == torch.float16:\n    x = x.clamp(max=torch.finfo(x.dtype).max - 1)")),
)
