"""qk_norm_rope_store: what Qwen3Attention does between its projections and its attention, and the right slots."""

import pytest
import torch
from exactness import EPS, assert_equal, lower_runs, runs
from pairs import every_pair
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hf_paged.kernels.layer import qk_norm_rope_store as module
from hf_paged.kernels.layer.qk_norm_rope_store import (
    HeadsToCache,
    qk_norm_rope_store,
    qk_norm_rope_store_many,
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    pytest.mark.usefixtures("guarded_outputs"),
]
FUNCTIONS = qk_norm_rope_store_reference, qk_norm_rope_store_triton, qk_norm_rope_store, qk_norm_rope_store_many
RUNS = runs(*FUNCTIONS)


class Case:
    """Random arguments: strided rows of qkv and tables, some tokens without a slot, caches with ends to guard."""

    def __init__(self, seed, device, dtype, head_dim, heads, kv_heads, tokens=5, block_size=16, norms=None,
                 tables=None):
        g = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.head_dim, num_positions = heads, kv_heads, head_dim, 40
        width = (heads + 2 * kv_heads) * head_dim
        wide = torch.full((tokens, width + 32), torch.nan)
        wide[:, 16:-16] = torch.randn(tokens, width, generator=g) * 3
        self.qkv = wide.to(dtype).to(device)[:, 16:-16]
        weights = 1 + 0.3 * torch.randn(2, head_dim, generator=g)
        self.q_weight, self.k_weight = weights.to(norms or dtype).to(device)
        angles = torch.rand(num_positions, 2 * head_dim, generator=g) * 6.3
        self.cos, self.sin = (f(angles).to(tables or dtype).to(device)[:, :head_dim] for f in (torch.cos, torch.sin))
        self.sin = self.sin.contiguous()  # strides of their own
        self.positions = torch.randint(0, num_positions, (tokens,), generator=g).to(device)
        slots = 1 + torch.randperm(3 * block_size - 2, generator=g)[:tokens]
        slots[torch.rand(tokens, generator=g) < 0.3] = -1
        slots[0] = 0
        slots[-1] = 3 * block_size - 1
        self.slots = slots.to(device)
        caches = torch.randn(2, 5, block_size, kv_heads, head_dim, generator=g).to(dtype).to(device)
        self.caches = caches
        self.k_cache, self.v_cache = caches[0, 1:-1], caches[1, 1:-1]

    def heads_to_cache(self, eps=EPS):
        return HeadsToCache(self.q_weight, self.k_weight, eps, self.cos, self.sin, self.positions, self.slots,
                            self.k_cache, self.v_cache)

    def heads_of(self):
        """Query, key and value heads ``[T, heads, D]``."""
        q, k = self.heads, self.heads + self.kv_heads
        heads = self.qkv.unflatten(1, (-1, self.head_dim))
        return heads[:, :q], heads[:, q:k], heads[:, k:]

    def rotated(self, query, key):
        """Stock's RoPE of normed heads ``[T, heads, D]``."""
        cos, sin = (table[self.positions][None] for table in (self.cos, self.sin))
        query, key = (t[None].transpose(1, 2) for t in (query, key))
        return [t[0].transpose(0, 1) for t in apply_rotary_pos_emb(query, key, cos, sin)]

    def stock(self, eps):
        query, key, _ = self.heads_of()
        normed = []
        for states, weight in ((query, self.q_weight), (key, self.k_weight)):
            norm = Qwen3RMSNorm(self.head_dim, eps)
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
            normed.append(norm(states))
        return self.rotated(*normed)

    def run(self, run, eps=EPS):
        """Query and the key as written, ``[T, heads, D]``; everything else in the caches is checked here."""
        expected = self.caches.clone()
        query = run(self.qkv, self.heads_to_cache(eps))
        kept = self.slots >= 0
        slots, value = self.slots[kept], self.heads_of()[2]
        flat = self.k_cache.flatten(0, 1)
        key = flat[slots].clone()
        expected[0, 1:-1].flatten(0, 1)[slots] = key
        expected[1, 1:-1].flatten(0, 1)[slots] = value[kept]
        assert_equal(self.caches, expected)
        assert query.is_contiguous()
        return query, key, kept

    def check(self, run):
        """Each head's row is stock's to the bit for a float32 mean square within 4 ulp of the exact one."""
        query, key, kept = self.run(run)
        matches = [torch.zeros(t.shape[:2], dtype=torch.bool, device=t.device) for t in (query, key)]
        for ulps in range(-4, 5):
            normed = []
            for states, weight in zip(self.heads_of(), (self.q_weight, self.k_weight), strict=False):
                variance = states.double().pow(2).mean(-1, keepdim=True).float()
                inverse = torch.rsqrt((variance.view(torch.int32) + ulps).view(torch.float32) + EPS)
                normed.append(weight * (states.float() * inverse).to(states.dtype))
            expected_query, expected_key = self.rotated(*normed)
            matches[0] |= (query == expected_query.to(query.dtype)).all(-1)
            matches[1] |= (key == expected_key[kept].to(key.dtype)).all(-1)
        assert matches[0].all()
        assert matches[1].all()


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype", "head_dim", "shape"), every_pair(
    RUNS, [32, 64, 80, 96, 128, 256], [(4, 2), (3, 1), (16, 8), (20, 20)]))
def test_norm_rotation_and_slots(run, device, dtype, head_dim, shape):
    heads, kv_heads = shape
    Case(head_dim + heads, device, dtype, head_dim, heads, kv_heads).check(run)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype", "head_dim", "kinds"), every_pair(
    lower_runs(*FUNCTIONS),
    [64, 80, 128], ["full full", "full lower", "lower full"]))
def test_dtypes_of_autocast(run, device, dtype, head_dim, kinds):
    """fp32 norms or tables: q and k stay in fp32 until attention rounds them, as does the cache."""
    norms, tables = (torch.float32 if kind == "full" else dtype for kind in kinds.split())
    case = Case(head_dim, device, dtype, head_dim, 4, 2, norms=norms, tables=tables)
    assert case.rotated(*case.heads_of()[:2])[0].dtype == tables
    case.check(run)


def in_parts(case, number):
    """Sums whose total depends on the order, and has bits that are rounded away once; the case's qkv is that total."""
    g = torch.Generator().manual_seed(number)
    large = torch.randn(number, *case.qkv.shape, generator=g) * 300
    large[-1] -= large[:-1].sum(0)
    parts = large.to(case.qkv.device)
    whole = torch.zeros_like(parts[0])
    for part in parts:
        whole += part
    assert not torch.equal(whole, sum(parts.flip(0)))
    case.qkv = whole.to(case.qkv.dtype)
    return parts


@pytest.mark.parametrize(("run", "device", "dtype", "head_dim", "number"), every_pair(
    runs(*FUNCTIONS[:3]), [32, 80, 128], [3, 4, 8]))
@pytest.mark.parametrize("norms", [True, False])
def test_a_product_in_parts_is_added_up_in_order_and_rounded_once(run, device, dtype, head_dim, number, norms):
    case = Case(head_dim, device, dtype, head_dim, 6, 3)
    if not norms:
        case.q_weight = case.k_weight = None
    parts = in_parts(case, number)
    whole = case.run(run)
    for one, other in zip(case.run(lambda qkv, *rest: run(parts, *rest)), whole, strict=True):
        assert_equal(one, other)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), runs(*FUNCTIONS[:3]))
def test_many_tokens_in_parts(run, device, dtype, monkeypatch):
    monkeypatch.setattr(module, "_MANY_TOKENS", 5)
    case = Case(7, device, dtype, 64, 4, 2)
    parts = in_parts(case, 3)
    whole = case.run(run)
    for one, other in zip(case.run(lambda qkv, *rest: run(parts, *rest)), whole, strict=True):
        assert_equal(one, other)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
def test_many_tokens(run, device, dtype):
    Case(8, device, dtype, 32, 5, 2, tokens=515, block_size=176).check(run)


@pytest.mark.interpreted
def test_only_many_tokens_take_the_kernel_for_many(monkeypatch):
    case, found = Case(9, "cpu", torch.float32, 32, 4, 2), []
    # Single names: patching all globals would take away again what the interpreter has put there.
    monkeypatch.setattr(module, "qk_norm_rope_store_many", lambda *args: found.append(args))
    case.run(qk_norm_rope_store_triton)
    assert not found
    monkeypatch.setattr(module, "_MANY_TOKENS", 5)
    assert qk_norm_rope_store_triton(case.qkv, case.heads_to_cache()) is None
    assert len(found) == 1


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_no_token_has_a_slot(run, device, dtype, block_size):
    case = Case(2, device, dtype, 64, 4, 2, block_size=block_size)
    case.slots[:] = -1
    case.check(run)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
def test_no_tokens(run, device, dtype):
    case = Case(3, device, dtype, 64, 4, 2)
    case.qkv, case.positions, case.slots = case.qkv[:0], case.positions[:0], case.slots[:0]
    assert case.run(run)[0].shape == (0, 4, 64)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype", "head_dim", "edge"), every_pair(
    RUNS, [80, 128], ["zero", "inf", "-inf", "nan", "max", "tiny"]))
def test_heads_at_the_edges(run, device, dtype, head_dim, edge):
    """A bad head spoils itself alone: zeros, infinities, NaN, overflow of the squares, the smallest normal numbers."""
    case = Case(4, device, dtype, head_dim, 4, 2, tokens=6)
    clean = [t.clone() for t in case.run(run)[:2]]
    info = torch.finfo(dtype)
    query, key, _ = case.heads_of()
    for head in (query[1, 2], key[0, 1]):
        if edge in ("inf", "-inf", "nan"):
            head[7] = float(edge)
        else:
            head[:] = {"zero": 0.0, "max": info.max, "tiny": info.tiny}[edge]
    dirty = case.run(run)
    expected = case.stock(EPS)
    torch.testing.assert_close(dirty[0][1, 2], expected[0][1, 2], rtol=8 * info.eps, atol=8 * info.tiny, equal_nan=True)
    torch.testing.assert_close(dirty[1][0, 1], expected[1][0, 1], rtol=8 * info.eps, atol=8 * info.tiny, equal_nan=True)
    for new, old, at in ((dirty[0], clean[0], (1, 2)), (dirty[1], clean[1], (0, 1))):
        new[at] = old[at]
        assert_equal(new, old)


def bit_patterns(dtype, shape, g):
    """Random finite normals, zeros, infinities and NaN, each sign; a fifth lies near 1, where sums round and cancel."""
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(whole)
    values = torch.randint(info.min, info.max + 1, shape, generator=g).to(whole).view(dtype)
    values[values.abs() < torch.finfo(dtype).tiny] = 0.0
    near = torch.rand(shape, generator=g) < 0.2
    return torch.where(near, (torch.rand(shape, generator=g) * 4 - 2).to(dtype), values)


def check_rotation(run, device, dtype, seed, tokens):
    """Heads of +-1 norm to +-1 exactly (eps 0), so that what is rotated is the weight, whatever its bits."""
    g = torch.Generator().manual_seed(seed)
    case = Case(seed, device, dtype, 256, 2, 1, tokens=tokens, block_size=tokens + 2)
    signs = torch.randint(0, 2, case.qkv.shape, generator=g).to(dtype) * 2 - 1
    case.qkv[:] = signs.to(device)
    case.q_weight, case.k_weight = bit_patterns(dtype, (2, 256), g).to(device)
    case.cos, case.sin = bit_patterns(dtype, (2, tokens, 256), g).to(device)
    # Products and sums that lie half-way between two values.
    ulp = torch.finfo(dtype).eps
    case.q_weight[:128] = (1 + torch.randint(0, 64, (128,), generator=g) * ulp).to(dtype).to(device)
    case.cos[::2] = (1 + torch.randint(-64, 64, (128,), generator=g) * ulp / 2).repeat(2).to(dtype).to(device)
    case.sin[::4] = (torch.randint(-9, 9, (256,), generator=g) * ulp / 4).to(dtype).to(device)
    case.positions = torch.arange(tokens, device=device)
    case.slots = torch.arange(tokens, device=device)
    query, key, _ = case.run(run, eps=0.0)
    for actual, expected in zip((query, key), case.stock(0.0), strict=True):
        # Where stock's result is subnormal, a product or a sum was: nothing is promised there.
        normal = ~((expected != 0) & (expected.abs() < torch.finfo(dtype).tiny))
        assert normal.float().mean() > 0.9
        assert_equal(actual[normal], expected[normal])


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
@pytest.mark.parametrize("seed", range(3))
def test_rotation_is_stocks_on_all_values(run, device, dtype, seed):
    check_rotation(run, device, dtype, seed, tokens=4000 if device == "cuda" else 24)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(32, 4, 2), (80, 3, 1), (96, 16, 8), (256, 2, 2)])
@pytest.mark.parametrize("full_tables", [False, True])
def test_without_norms_the_rotation_is_stocks_to_the_bit(run, device, dtype, head_dim, heads, kv_heads, full_tables):
    """As in a Llama: on ordinary values, and on any bits of a head and of the tables."""
    g = torch.Generator().manual_seed(head_dim)
    tables = torch.float32 if full_tables else dtype  # as under autocast
    case = Case(7, device, dtype, head_dim, heads, kv_heads, tokens=9, tables=tables)
    case.q_weight = case.k_weight = None
    for any_bits in (False, True):
        if any_bits:
            case.qkv[:] = bit_patterns(dtype, case.qkv.shape, g).to(device)
            case.cos, case.sin = bit_patterns(tables, (2, *case.cos.shape), g).to(device)
        query, key, kept = case.run(run)
        expected_query, expected_key = (t.to(dtype) for t in case.rotated(*case.heads_of()[:2]))
        for actual, expected in ((query, expected_query), (key, expected_key[kept])):
            normal = ~((expected != 0) & (expected.abs() < torch.finfo(dtype).tiny))
            assert normal.float().mean() > 0.9
            assert_equal(actual[normal], expected[normal])


@pytest.mark.gpu
def test_gpu_offsets_past_two_billion_elements():
    head_dim, kv_heads, block_size = 128, 8, 16
    num_blocks = int(2.4e9) // (kv_heads * head_dim * block_size)
    k_cache, v_cache = (
        torch.zeros(num_blocks, block_size, kv_heads, head_dim, dtype=torch.float16, device="cuda") for _ in range(2)
    )
    case = Case(5, "cuda", torch.float16, head_dim, 16, kv_heads, tokens=3)
    spread = torch.zeros(2 * 1_100_000_000 + case.qkv.shape[1], dtype=torch.float16, device="cuda")
    qkv = spread.as_strided(case.qkv.shape, (1_100_000_000, 1))
    qkv.copy_(case.qkv)
    slots = torch.tensor([num_blocks * block_size - 1, 0, num_blocks * block_size - 40], device="cuda")
    heads = case.heads_to_cache()
    query = qk_norm_rope_store(qkv, heads._replace(slot_mapping=slots, k_cache=k_cache, v_cache=v_cache))
    case.slots = torch.arange(3, device="cuda")
    assert_equal(query, qk_norm_rope_store(case.qkv, case.heads_to_cache()))
    for far, near in ((k_cache, case.k_cache), (v_cache, case.v_cache)):
        assert_equal(far.flatten(0, 1)[slots], near.flatten(0, 1)[:3])
        assert int(far.any(-1).any(-1).sum()) == 3
