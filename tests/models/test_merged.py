"""Merged weights: q/k/v and gate/up side by side, while everybody else sees parameters like any others.

Weights are merged on CUDA. Here they are on the CPU, too, in memory that only tests have (`HostMemory`), but where a
test says how it is there: nothing is merged.
"""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import safetensors.torch
import support
import torch
from support import HostMemory, assert_native_parity, random_prompts, run_out, stock_copy, stock_generate
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

import hf_paged
from hf_paged.models import fused, linears
from hf_paged.models.merged import MergedWeight

DEVICE = torch.device("cpu")  # of the test that runs
CUDA = pytest.param("cuda:0", marks=pytest.mark.gpu)
on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)
on_cuda = pytest.mark.parametrize("device", [CUDA], indirect=True)


@pytest.fixture(autouse=True, params=["cpu", CUDA])
def device(request, monkeypatch):
    monkeypatch.setattr(f"{__name__}.DEVICE", torch.device(request.param))
    if request.param == "cpu" and "as_on_a_cpu" not in request.fixturenames:
        monkeypatch.setattr(linears, "adjacent_memory", HostMemory)


@pytest.fixture
def as_on_a_cpu():
    """There nothing is merged."""


def tiny_model(seed=0, **overrides):
    model = support.tiny_model(seed, **overrides)
    for p in reversed(list(model.parameters())):  # backwards, or the allocator might lay them side by side by itself
        p.data = p.data.to(DEVICE)
    return model.to(DEVICE)


def trained_alike(**overrides):
    """A model whose gradients are the same every time; on CUDA those of fused attention need not be."""
    return tiny_model(**overrides, **({} if DEVICE.type == "cpu" else {"attn_implementation": "eager"}))


def inputs():
    return {name: tensor.to(DEVICE) for name, tensor in support.batch([40, 20]).items()}


MERGED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def projections(model):
    """(name, weight) of everything that is merged."""
    return [(n, p) for n, p in model.named_parameters() if n.split(".")[-2] in MERGED and n.endswith(".weight")]


def merges(model):
    """The merged tensors as the next step would use them; None where the layers are called one by one."""
    executor = hf_paged.get_engine(model)._executor
    return [view.weight for view in views(executor)]


def views(executor):
    """Of q, k, v of all layers, then of gate and up."""
    return [layer.qkv for layer in executor._layer_parts] + [layer.gate_up for layer in executor._layer_parts]


def assert_merged(model):
    assert len(merges(model)) == 2 * len(model.model.layers)
    for weight, layers in zip(merges(model), _groups(model), strict=True):
        assert weight is not None
        assert torch.equal(weight, torch.cat([layer.weight for layer in layers]))
        assert layers[0].weight.data_ptr() == weight.data_ptr()  # the same memory, no second copy


def _groups(model):
    attentions, mlps = [x.self_attn for x in model.model.layers], [x.mlp for x in model.model.layers]
    return [(a.q_proj, a.k_proj, a.v_proj) for a in attentions] + [(m.gate_proj, m.up_proj) for m in mlps]


def used(model=None):
    """An enabled model after its first native call."""
    model = hf_paged.enable(tiny_model() if model is None else model, strict=True)
    assert_native_parity(model, **inputs(), max_new_tokens=6)
    assert_merged(model)
    return model


def q_proj(model):
    return model.model.layers[0].self_attn.q_proj


# -- what a parameter looks like ------------------------------------------


def test_merging_moves_no_parameter_object_and_changes_no_value():
    model = tiny_model()
    before = {name: (p, p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    q_proj(model).weight.requires_grad_(False)
    used(model)
    for name, p in model.named_parameters():
        same, values, _ = before[name]
        assert p is same
        assert type(p) is nn.Parameter and p.is_leaf and p.is_contiguous() and p.storage_offset() == 0
        assert torch.equal(p, values)
        assert p.requires_grad == (name != "model.layers.0.self_attn.q_proj.weight")


def test_every_parameter_has_a_storage_of_its_own_size():
    model = used()
    storages = [p.untyped_storage() for p in model.parameters()]
    assert [s.nbytes() for s in storages] == [p.numel() * p.element_size() for p in model.parameters()]
    assert len({s.data_ptr() for s in storages}) == len(storages)


# -- checkpoints ------------------------------------------


def _accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=DEVICE.type == "cpu")


def _save_state(model, folder):
    torch.manual_seed(0)
    accelerator = _accelerator()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(folder))


def _save_state_as_pickle(model, folder):
    accelerator = _accelerator()
    accelerator.prepare(model)
    accelerator.save_state(str(folder), safe_serialization=False)


WRITERS = {
    "accelerate save_state": _save_state,
    "accelerate save_state, torch.save": _save_state_as_pickle,
    "accelerate save_model": lambda model, folder: _accelerator().save_model(model, str(folder)),
    "accelerate save_model in shards": lambda model, folder: _accelerator().save_model(
        model, str(folder), max_shard_size="100KB"
    ),
    "safetensors save_model": lambda model, folder: safetensors.torch.save_model(model, str(folder / "m.safetensors")),
    "safetensors save_file": lambda model, folder: safetensors.torch.save_file(
        {n: p.data for n, p in model.named_parameters()}, str(folder / "m.safetensors")
    ),
    "torch.save state_dict": lambda model, folder: torch.save(model.state_dict(), folder / "m.pt"),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "save_pretrained in shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="100KB"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_checkpoints_of_merged_weights_are_stocks_byte_for_byte(tmp_path, writer, tied):
    stock, model = (tiny_model(tie_word_embeddings=tied) for _ in range(2))
    used(model)
    for name, m in (("stock", stock), ("merged", model)):
        (tmp_path / name).mkdir()
        WRITERS[writer](m, tmp_path / name)
    assert_merged(model)
    files = sorted(p.name for p in (tmp_path / "stock").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "merged").iterdir())
    for file in files:
        if not file.startswith("random_states"):  # the generators' states
            assert (tmp_path / "stock" / file).read_bytes() == (tmp_path / "merged" / file).read_bytes(), file


def test_a_pickled_model_holds_no_byte_of_the_merged_memory_besides_its_weights(tmp_path):
    stock, model = tiny_model(), used()
    torch.save(stock, tmp_path / "stock")
    torch.save(model, tmp_path / "merged")
    assert abs((tmp_path / "stock").stat().st_size - (tmp_path / "merged").stat().st_size) < 4096
    loaded = torch.load(tmp_path / "merged", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), stock.parameters(), strict=True))


def test_accelerates_saved_state_loads_into_a_merged_model(tmp_path):
    source = tiny_model(3)
    _save_state(source, tmp_path)
    model = used()
    accelerator = _accelerator()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    assert_native_parity(model, source.generate(**inputs(), max_new_tokens=6), **inputs(), max_new_tokens=6)


# -- training ------------------------------------------

OPTIMIZERS = {
    "AdamW by loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD with momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


def _loss(model):
    ids = torch.tensor(random_prompts([30, 30]), device=DEVICE)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.each_value
@pytest.mark.parametrize("made_first", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_merged_weights_bitwise_like_a_stock_copy(name, made_first):
    model, stock = trained_alike(), trained_alike()
    optimizer = OPTIMIZERS[name](model.parameters()) if made_first else None
    used(model)
    optimizer = optimizer or OPTIMIZERS[name](model.parameters())
    other = OPTIMIZERS[name](stock.parameters())
    for _ in range(3):
        for m, o in ((model, optimizer), (stock, other)):
            _loss(m).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            o.zero_grad()
        for (n, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
            assert torch.equal(ours, theirs), n
        assert_native_parity(model, stock.generate(**inputs(), max_new_tokens=6), **inputs(), max_new_tokens=6)
        assert_merged(model)  # the step wrote into the merged memory


def test_the_first_native_call_between_forward_and_backward():
    model, stock = hf_paged.enable(trained_alike(), strict=True), trained_alike()
    loss, other = _loss(model), _loss(stock)
    model.generate(**inputs(), max_new_tokens=3)
    loss.backward()
    other.backward()
    for (n, ours), theirs in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert torch.equal(ours.grad, theirs[1].grad), n


# -- weights that went elsewhere ------------------------------------------


def _flat(model):
    """Every weight becomes a view of one buffer, as ZeRO-like optimizers do it."""
    weights = [p for _, p in projections(model)]
    flat = torch.cat([p.data.flatten() for p in weights])
    for p, piece in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.data = piece.view_as(p)
    return flat


def _flat_after(model):
    _flat(model).neg_()


def _not_contiguous(model):
    weight = q_proj(model).weight
    weight.data = (-2.0 * weight.data).t().contiguous().t()
    assert not weight.is_contiguous()


def _transposed_in_place(model):
    weight = q_proj(model).weight
    assert weight.shape[0] == weight.shape[1]
    weight.data = weight.data.t()


def _replaced(model):
    q_proj(model).weight = nn.Parameter(-2.0 * q_proj(model).weight.detach())


def _replaced_over_the_old_memory(model):
    q_proj(model).weight = nn.Parameter(q_proj(model).weight.data)
    q_proj(model).weight.data.neg_()


def _pointed_elsewhere(model):
    q_proj(model).weight.data = -2.0 * q_proj(model).weight.data


def _rows_exchanged_by_pointer(model):
    """Two parameters swap their memory: each place is still a slice of the merged one, but not that one's own."""
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.up_proj.weight.data, mlp.gate_proj.weight.data


def _modules_exchanged(model):
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def _new_module(model):
    attention = model.model.layers[1].self_attn
    attention.k_proj = tiny_model(5).model.layers[0].self_attn.k_proj


def _another_decoder(model):
    """Of the same config, so that nothing but its identity tells."""
    model.model = Qwen3Model(model.config).to(DEVICE).eval()


def _module_with_bias(model):
    old = q_proj(model)
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 64, device=DEVICE)
    q_proj(model).weight = old.weight
    q_proj(model).bias.data.normal_(0.0, 3.0)


def _bias_given(model):
    q_proj(model).bias = nn.Parameter(3.0 * torch.randn(64, generator=torch.Generator().manual_seed(1)).to(DEVICE))


def _assigned(model):
    model.load_state_dict(tiny_model(5).state_dict(), assign=True)


def _loaded(model):
    model.load_state_dict(tiny_model(5).state_dict())


def _lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).eval()


def _dora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["k_proj"], init_lora_weights=False, use_dora=True)
    peft.get_peft_model(model, config).eval()


def _shared_between_layers(model):
    model.model.layers[1].self_attn.k_proj = model.model.layers[0].self_attn.k_proj


def _shared_within_a_layer(model):
    model.model.layers[0].self_attn.v_proj.weight = model.model.layers[0].self_attn.k_proj.weight


def _moved_to_shared_memory(model):
    model.share_memory()
    q_proj(model).weight.data.neg_()


def _numpy_write(model):
    if DEVICE.type != "cpu":
        pytest.skip("numpy reads the host's memory")
    q_proj(model).weight.detach().numpy()[:] *= -2.0


CHANGES = [
    _flat_after, _not_contiguous, _transposed_in_place, _replaced, _replaced_over_the_old_memory, _pointed_elsewhere,
    _rows_exchanged_by_pointer, _modules_exchanged, _new_module, _another_decoder, _module_with_bias, _bias_given,
    _assigned, _loaded, _lora, _dora, _shared_between_layers, _shared_within_a_layer, _moved_to_shared_memory,
    _numpy_write,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_change_after_the_merge_is_respected(change):
    """Whatever becomes of a parameter or its layer, the next call equals stock, and so do those after it."""
    model = used()
    before = stock_generate(model, **inputs(), max_new_tokens=12)
    torch.manual_seed(1)
    change(model)
    expected = stock_generate(model, **inputs(), max_new_tokens=12)
    assert not torch.equal(expected, before), "the change does not show"
    assert_native_parity(model, expected, **inputs(), max_new_tokens=12)
    with torch.no_grad():  # a write to the memory as it is now
        q_proj(model).weight.mul_(-1.5)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.5)
    assert_native_parity(model, **inputs(), max_new_tokens=12)
    hf_paged.disable(model)
    expected = stock_generate(model, **inputs(), max_new_tokens=12)
    assert torch.equal(model.generate(**inputs(), max_new_tokens=12), expected)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_change_before_the_first_native_call_is_respected(change):
    model = hf_paged.enable(tiny_model(), strict=True)
    torch.manual_seed(1)
    change(model)
    assert_native_parity(model, **inputs(), max_new_tokens=12)
    with torch.no_grad():
        q_proj(model).weight.mul_(-1.5)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.5)
    assert_native_parity(model, **inputs(), max_new_tokens=12)


@pytest.mark.parametrize("replace", [_assigned, _replaced], ids=lambda f: f.__name__.strip("_"))
def test_a_parameter_that_was_replaced_is_let_go(replace):
    """At the next call, with its memory."""
    model = used()
    old, memory = weakref.ref(q_proj(model).weight), StorageWeakRef(q_proj(model).weight.untyped_storage())
    replace(model)
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    gc.collect()
    assert old() is None and memory.expired()


@pytest.fixture
def looks(monkeypatch):
    """What calls do besides comparing: grows by "merge" and "parts"."""
    found = []
    for owner, name, kind in ((linears.DecoderLinears, "merge", "merge"),
                              (fused.FusedExecutor, "_look_up_parts", "parts")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name,
                            lambda self, *args, own=own, kind=kind: found.append(kind) or own(self, *args))
    return found


def test_nothing_is_looked_up_again_while_all_weights_stay_where_they_are(looks):
    model = used()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looks.clear()
    for _ in range(2):
        _loss(model).backward()
        optimizer.step()
        assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert not looks
    assert_merged(model)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_change_leads_to_is_what_a_look_at_everything_finds(change, looks):
    """Of a model whose parts were looked up before it, and in the call after."""
    model = used()
    executor = hf_paged.get_engine(model)._executor
    torch.manual_seed(1)
    change(model)
    for _ in range(2):
        model.generate(**inputs(), max_new_tokens=2)
        found = views(executor)
        executor._look_up_parts()
        assert [(v.linears, id(v.weight), v.are_plain) for v in found] == [
            (v.linears, id(v.weight), v.are_plain) for v in views(executor)]


def test_a_parameter_that_comes_back_to_its_place_is_read_with_the_others_again():
    model = used()
    place = q_proj(model).weight.data
    q_proj(model).weight.data = -2.0 * place
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert merges(model)[0] is None
    q_proj(model).weight.data = place
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert_merged(model)


def test_weights_that_nobody_holds_an_alias_of_any_more_are_merged_by_the_next_call():
    model = hf_paged.enable(tiny_model(), strict=True)
    alias = q_proj(model).weight.data
    assert_native_parity(model, **inputs(), max_new_tokens=2)
    assert merges(model)[0] is None and alias is not None
    del alias
    assert_native_parity(model, **inputs(), max_new_tokens=2)
    assert_merged(model)


@on_cpu
def test_aliases_that_graphs_hold_keep_no_weight_where_it_is(monkeypatch):
    model = hf_paged.enable(tiny_model(), strict=True)
    alias = q_proj(model).weight.data
    assert_native_parity(model, **inputs(), max_new_tokens=2)
    assert merges(model)[0] is None and alias is not None
    del alias
    runner, held = hf_paged.get_engine(model)._core.pool.runner, [p.detach() for p in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "graphs", SimpleNamespace(check=lambda: None, drop_references=held.clear))
        runner.prepare()
    assert_merged(model)


@pytest.mark.parametrize("are_plain", [True, False])
@on_cpu
def test_graphs_let_go_only_for_layers_that_can_be_merged(are_plain):
    """Quantized layers stay unmerged for good: each prompt would pay for new aliases."""
    executor = hf_paged.get_engine(used())._executor
    assert not executor.has_unmerged
    executor._layer_parts = [parts._replace(qkv=parts.qkv._replace(weight=None, are_plain=are_plain))
                             for parts in executor._layer_parts]
    assert executor.has_unmerged is are_plain


def test_layers_that_are_replaced_between_two_steps_are_merged_by_the_next_call():
    """The step after it only looks up what it has to read."""
    model = used()
    engine = hf_paged.get_engine(model)
    old = weakref.ref(q_proj(model).weight)
    for prompt in random_prompts([20, 9]):
        engine.add_request(prompt, max_new_tokens=6)
    engine.step()
    ours, others = model.model.layers[0].self_attn, tiny_model(5).model.layers[0].self_attn
    ours.q_proj, ours.k_proj, ours.v_proj = others.q_proj, others.k_proj, others.v_proj
    del others
    run_out(engine)
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert_merged(model)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize(("owner", "where"), [
    (linears.DecoderLinears, "merge"), (fused.FusedExecutor, "_collect_parts"),
])
def test_a_change_that_an_interrupted_call_saw_first_is_respected(owner, where, monkeypatch):
    model = used()
    own = getattr(owner, where)

    def interrupted(self, *args):
        monkeypatch.setattr(owner, where, own)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, where, interrupted)
    _bias_given(model)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs(), max_new_tokens=4)
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert merges(model)[0] is None


def test_weights_that_were_all_replaced_are_merged_anew():
    model = used()
    _assigned(model)
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert_merged(model)


def test_parameters_in_somebody_elses_buffer_stay_there():
    model = tiny_model()
    flat = _flat(model)
    places = [p.data_ptr() for p in model.parameters()]
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **inputs(), max_new_tokens=12)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(weight is None for weight in merges(model))
    flat.mul_(-1.5)
    assert torch.equal(q_proj(model).weight.flatten(), flat[:4096])
    assert_native_parity(model, **inputs(), max_new_tokens=12)


@on_cpu
def test_parameters_in_shared_memory_stay_shared():
    """Other processes read and write them there."""
    model = tiny_model()
    model.share_memory()
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **inputs(), max_new_tokens=6)
    assert all(p.is_shared() for p in model.parameters())


@pytest.mark.parametrize(("alias", "device"), [
    ("state_dict", "cpu"), ("data", "cpu"), ("numpy", "cpu"),
    pytest.param("state_dict", "cuda:0", marks=pytest.mark.gpu), pytest.param("data", "cuda:0", marks=pytest.mark.gpu),
], indirect=["device"])
def test_tensors_that_alias_a_parameter_since_before_the_merge_still_do(alias):
    """As with stock: a state_dict that was taken once is written to, and the model has changed."""
    model = hf_paged.enable(tiny_model(), strict=True)
    weight = q_proj(model).weight
    held = {
        "state_dict": lambda: model.state_dict()["model.layers.0.self_attn.q_proj.weight"],
        "data": lambda: weight.data,
        "numpy": lambda: weight.detach().numpy(),
    }[alias]()
    first = assert_native_parity(model, **inputs(), max_new_tokens=6)
    held *= -2.0
    assert torch.equal(weight.detach(), torch.as_tensor(held))
    assert not torch.equal(assert_native_parity(model, **inputs(), max_new_tokens=6), first)


def test_two_models_over_the_same_memory_stay_together():
    model, other = tiny_model(), tiny_model(5)
    other.load_state_dict(model.state_dict(), assign=True)
    used_model = hf_paged.enable(model, strict=True)
    assert_native_parity(used_model, **inputs(), max_new_tokens=6)
    with torch.no_grad():
        q_proj(model).weight.neg_()
    assert torch.equal(q_proj(other).weight, q_proj(model).weight)


# -- copies and casts ------------------------------------------


def test_a_deep_copy_of_a_merged_model_is_independent_of_it():
    model = used()
    expected = assert_native_parity(model, **inputs(), max_new_tokens=12)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.neg_()
    assert_native_parity(model, expected, **inputs(), max_new_tokens=12)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    assert all(torch.equal(-3.0 * c, p) for c, p in zip(copied.parameters(), model.parameters(), strict=True))
    used(copied)
    assert_merged(model)


@pytest.mark.parametrize("cast", [
    lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.half().float(),
], ids=["half", "bfloat16", "to", "there and back"])
def test_a_cast_of_a_merged_model(cast):
    model = used()
    reference = cast(tiny_model())
    cast(model)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert_native_parity(model, reference.generate(**inputs(), max_new_tokens=8), **inputs(), max_new_tokens=8)
    with torch.no_grad():
        q_proj(model).weight.neg_()
    assert_native_parity(model, **inputs(), max_new_tokens=8)


def test_a_cast_to_another_dtype_is_merged_anew():
    model = used().bfloat16()
    assert_native_parity(model, **inputs(), max_new_tokens=8)
    assert_merged(model)
    assert merges(model)[0].dtype == torch.bfloat16


# -- giving the memory back ------------------------------------------


def assert_memory_of_their_own(model):
    for p in model.parameters():
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        assert p.untyped_storage().resizable() or DEVICE.type == "cpu"
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


def _disable(model):
    hf_paged.disable(model)


def _release(model):
    hf_paged.get_engine(model).release_memory()


@pytest.mark.parametrize("give_back", [_disable, _release])
@pytest.mark.parametrize("tied", [False, True])
def test_afterwards_every_parameter_has_memory_of_its_own(give_back, tied):
    model = tiny_model(tie_word_embeddings=tied)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = list(model.parameters())
    used(model)
    _loss(model).backward()
    grads = [p.grad for p in objects]
    memory = [weakref.ref(w) for w in merges(model)]
    give_back(model)
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)
    for (name, p), same, grad in zip(model.named_parameters(), objects, grads, strict=True):
        assert p is same and p.grad is grad
        assert torch.equal(p, values[name]), name
    assert_memory_of_their_own(model)
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    optimizer.step()
    expected = stock_generate(model, **inputs(), max_new_tokens=6)
    assert torch.equal(model.generate(**inputs(), max_new_tokens=6), expected)


@pytest.mark.parametrize("give_back", [_disable, _release])
def test_giving_back_moves_nothing(give_back):
    """Every parameter has memory of its own already: none is needed for it."""
    model = used()
    places = [p.data_ptr() for p in model.parameters()]
    give_back(model)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_weights_that_lie_side_by_side_are_merged_where_they_are(monkeypatch):
    """Also where somebody holds an alias: nothing moves."""
    model = used()
    places = [p.data_ptr() for p in model.parameters()]
    state = model.state_dict()
    hf_paged.disable(model)
    memory = type(linears.adjacent_memory(DEVICE))
    monkeypatch.setattr(memory, "place", lambda self, like: pytest.fail("a weight moves") if like else None)
    used(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    state["model.layers.0.self_attn.q_proj.weight"].neg_()
    assert_native_parity(model, **inputs(), max_new_tokens=6)


@pytest.mark.parametrize("give_back", [_disable, _release])
def test_a_tensor_that_aliases_a_merged_parameter_still_does_when_the_memory_is_given_back(give_back):
    model = used()
    held = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    give_back(model)
    held.mul_(-2.0)
    assert torch.equal(q_proj(model).weight, held)
    storages = [p.untyped_storage() for p in model.parameters()]  # each of its own size, as a checkpoint wants them
    assert [s.nbytes() for s in storages] == [p.numel() * p.element_size() for p in model.parameters()]
    assert len({s.data_ptr() for s in storages}) == len(storages)


@pytest.mark.parametrize("give_back", [_disable, _release])
def test_giving_back_leaves_parameters_alone_that_went_elsewhere(give_back):
    model = used()
    flat = _flat(model)
    give_back(model)
    flat.mul_(-1.5)
    assert torch.equal(q_proj(model).weight.flatten(), flat[:4096])


def test_round_and_round():
    model, stock = tiny_model(), tiny_model()
    for _ in range(3):
        used(model)
        hf_paged.get_engine(model).release_memory()
        assert_native_parity(model, **inputs(), max_new_tokens=6)
        assert_merged(model)
        hf_paged.disable(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_merging_under_inference_mode_leaves_weights_that_can_be_trained():
    model = hf_paged.enable(tiny_model(), strict=True)
    with torch.inference_mode():
        model.generate(**inputs(), max_new_tokens=6)
    assert_merged(model)
    assert not any(p.is_inference() for p in model.parameters())
    _loss(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_native_parity(model, **inputs(), max_new_tokens=6)
    with torch.inference_mode():
        hf_paged.get_engine(model).release_memory()
    assert not any(p.is_inference() for p in model.parameters())


def test_a_closed_generator_gives_the_memory_back():
    model = tiny_model()
    with hf_paged.PagedGenerator(model) as generator:
        generator.generate(random_prompts([20]), max_new_tokens=3)
        assert_merged(model)
    assert_memory_of_their_own(model)
    assert torch.equal(q_proj(model).weight, q_proj(stock_copy(model)).weight)


# -- what merged tensors read ------------------------------------------


def test_no_memory_of_a_merged_weight_goes_while_steps_may_read_it():
    model = used()
    storage = StorageWeakRef(q_proj(model).weight.untyped_storage())
    q_proj(model).weight.data = q_proj(model).weight.detach().clone()
    assert not storage.expired()
    _release(model)
    gc.collect()
    assert storage.expired()


@on_cpu
def test_memory_is_held_where_another_storage_came_to_its_address():
    """As where a storage was resized, and the address lent to another."""
    model = used()
    weight = q_proj(model).weight
    weight.data = torch.from_dlpack(weight.data)
    assert_native_parity(model, **inputs(), max_new_tokens=4)
    assert_merged(model)
    storage = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.detach().clone()
    assert not storage.expired()


def test_a_merged_tensor_owns_no_memory():
    model = used()
    expected = assert_native_parity(model, **inputs(), max_new_tokens=6)
    storages = [StorageWeakRef(p.untyped_storage()) for _, p in projections(model)]
    tensors = merges(model)
    _release(model)
    for _, p in projections(model):
        p.data = p.detach().clone()
    gc.collect()
    assert tensors and all(storage.expired() for storage in storages)
    assert_native_parity(model, expected, **inputs(), max_new_tokens=6)


@on_cpu
def test_a_weight_that_has_less_memory_at_the_same_place_ends_the_merge():
    """As where a block is freed, and a smaller one begins at its address."""
    memory = torch.randn(16, 4)
    weight = nn.Parameter(memory[:8])
    merged = MergedWeight([weight], [weight.data], HostMemory(DEVICE))
    assert torch.equal(merged.current(), memory[:8])
    weight.data = torch.from_dlpack(memory[:8])
    assert weight.data_ptr() == memory.data_ptr() and merged.current() is None


# -- storages that are resized ------------------------------------------


def _all_resized(model):
    """As offloading does it: the values go elsewhere, the parameters stay without memory. Returns the values."""
    values = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.untyped_storage().resize_(0)
    return values


def _fill(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.untyped_storage().resize_(value.numel() * value.element_size())
        p.data.copy_(value)


@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("caching", [False, True])
def test_storages_can_be_resized_after_a_native_call(caching):
    model = hf_paged.enable(tiny_model(), strict=True, enable_prefix_caching=caching)
    expected = assert_native_parity(model, **inputs(), max_new_tokens=6)
    assert all((weight is None) == (DEVICE.type == "cpu") for weight in merges(model))
    for _ in range(2):
        values = _all_resized(model)
        _fill(model, values)
        assert_native_parity(model, expected, **inputs(), max_new_tokens=6)
    values = _all_resized(model)
    _fill(model, [-value for value in values])
    assert not torch.equal(assert_native_parity(model, **inputs(), max_new_tokens=6), expected)


@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.filterwarnings("ignore::hf_paged.FallbackWarning")
def test_a_call_of_a_model_without_memory_ends_as_in_stock(which):
    """Nobody reads what was freed, neither the step nor the checksum over the weights."""
    model, stock = hf_paged.enable(tiny_model()), tiny_model()
    expected = assert_native_parity(model, **inputs(), max_new_tokens=6)
    q_values = q_proj(model).weight.detach().clone()
    if which == "all":
        values, _ = _all_resized(model), _all_resized(stock)
    for m in (model, stock):
        q_proj(m).weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as stocks:
        stock.generate(**inputs(), max_new_tokens=6)
    assert "has no memory" in hf_paged.get_engine(model).unsupported_reason()
    with pytest.raises(RuntimeError) as ours:
        model.generate(**inputs(), max_new_tokens=6)
    assert str(ours.value) == str(stocks.value)
    if which == "one":
        q_proj(model).weight.untyped_storage().resize_(q_values.nbytes)
        q_proj(model).weight.data.copy_(q_values)
    else:
        _fill(model, values)
    assert_native_parity(model, expected, **inputs(), max_new_tokens=6)


@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("looked", [False, True])
def test_a_storage_that_is_too_small_for_its_parameter_is_a_reason_for_stock(looked):
    model = hf_paged.enable(tiny_model())
    engine, storage = hf_paged.get_engine(model), q_proj(model).weight.untyped_storage()
    if looked:
        assert engine.unsupported_reason() is None
    needed = storage.nbytes()
    storage.resize_(needed - 4)
    reason = f"has {needed - 4} of {needed} bytes memory: its storage was resized"
    assert engine.unsupported_reason() == f"parameter model.layers.0.self_attn.q_proj.weight {reason}"
    storage.resize_(needed + 4)  # more than it needs is as good
    assert engine.unsupported_reason() is None
    model.model.rotary_emb.inv_freq.untyped_storage().resize_(0)
    assert engine.unsupported_reason() == "buffer model.rotary_emb.inv_freq has no memory: its storage was resized"


@on_cpu
@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 60])
def test_products_side_by_side_are_those_of_the_layers(dtype, rows):
    model = hf_paged.enable(tiny_model().to(dtype), strict=True)
    model.generate(**inputs(), max_new_tokens=2)
    hidden = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    executor = hf_paged.get_engine(model)._executor
    with torch.no_grad():
        for projections_, layers in zip(views(executor), _groups(model), strict=True):
            assert torch.equal(projections_(hidden, None)[0], torch.cat([layer(hidden) for layer in layers], dim=-1))


# -- storages that are resized, on CUDA ------------------------------------------

SUBSETS = {
    "in order": lambda model: list(model.parameters()),
    "backwards": lambda model: list(model.parameters())[::-1],
    "merged ones": lambda model: [p for _, p in projections(model)],
    "every other one": lambda model: [p for _, p in projections(model)][::2],
    **{name: lambda model, i=i: [projections(model)[i][1]] for i, name in enumerate(MERGED)},
}


@on_cuda
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("subset", SUBSETS)
def test_gpu_any_storage_is_resized_to_nothing_and_back(subset, eager):
    model = hf_paged.enable(tiny_model(), enforce_eager=eager)
    expected = assert_native_parity(model, **inputs(), max_new_tokens=12)
    assert_merged(model)
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert (hf_paged.get_engine(model).stats().num_graphs_captured == 0) == eager
    for factor in (1.0, 1.0, -1.5):
        weights = SUBSETS[subset](model)
        values = [factor * p.detach().cpu() for p in weights]
        before = torch.cuda.memory_allocated(DEVICE)
        for p in weights:
            p.untyped_storage().resize_(0)
        freed = before - torch.cuda.memory_allocated(DEVICE)
        assert freed >= sum(value.nbytes for value in values)
        assert "has no memory" in hf_paged.get_engine(model).unsupported_reason()
        for p, value in zip(reversed(weights), reversed(values), strict=True):
            p.untyped_storage().resize_(value.nbytes)
            p.data.copy_(value)
        assert_native_parity(model, expected if factor == 1.0 else None, **inputs(), max_new_tokens=12)
    hf_paged.disable(model)
    assert_memory_of_their_own(model)


@on_cuda
def test_gpu_the_cpu_and_back_leaves_no_weight_of_the_model_behind():
    model = used()
    expected = assert_native_parity(model, **inputs(), max_new_tokens=6)
    hf_paged.get_engine(model).release_memory()
    weights = sum(p.nbytes for p in model.parameters())
    before = torch.cuda.memory_allocated(DEVICE)
    model.cpu()
    gc.collect()
    assert before - torch.cuda.memory_allocated(DEVICE) >= weights
    model.to(DEVICE)
    assert_native_parity(model, expected, **inputs(), max_new_tokens=6)
    assert_merged(model)
