"""Each layer holds the rows, columns or heads that it says; slicing is arithmetic, so no other process is needed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from family_models import family_model
from torch import nn

from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import (
    ColumnParallelLinear,
    GatheringLinear,
    ReplicatedLinear,
    RowParallelLinear,
    Shard,
    SplittingLinear,
    VocabParallelHead,
    even_range,
    is_sharded,
    kv_head_range,
    local_kv_heads,
    shard_embedding,
    shard_experts,
    sharded_class,
    stock_class,
    vocab_rows,
    vocab_shard,
)


class Alone(ParallelGroup):
    """A rank of several whose sums and gathers see only what this test put there for the others."""

    def __init__(self, rank: int, size: int, others: list[torch.Tensor] | None = None) -> None:
        super().__init__(rank, size)
        self.others = others or []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return sum(self.others, tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([*self.others[: self.rank], tensor, *self.others[self.rank :]])


def filled(layer: nn.Module, stock: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(layer.shards[name].take(getattr(stock, name)))
    return layer.requires_grad_(False)


@pytest.mark.parametrize(("vocab_size", "size", "rows"), [
    (256, 1, 256), (250, 1, 250), (256, 2, 128), (250, 2, 128), (250, 4, 64), (2048, 2, 1024), (2049, 2, 2048),
    (151936, 2, 76800), (151936, 4, 38912), (32000, 8, 4096), (17, 4, 16),
])
def test_vocabulary_rows_of_a_rank(vocab_size: int, size: int, rows: int) -> None:
    assert vocab_rows(vocab_size, size) == rows
    shards = [vocab_shard((vocab_size, 3), rank, size) for rank in range(size)]
    held = [token for shard in shards for token in range(*shard.ranges[0])]
    assert held == list(range(vocab_size))
    assert all(stop - start + shard.padding == rows for shard in shards for start, stop in shard.ranges)


@pytest.mark.parametrize(("kv_heads", "size", "held"), [
    (8, 2, [(0, 4), (4, 8)]), (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]), (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
    (1, 2, [(0, 1), (0, 1)]), (3, 1, [(0, 3)]),
])
def test_kv_heads_follow_the_query_heads(kv_heads: int, size: int, held: list[tuple[int, int]]) -> None:
    assert [kv_head_range(kv_heads, rank, size) for rank in range(size)] == held
    query_heads = 4 * kv_heads * size
    for rank, (first, last) in enumerate(held):
        queries = range(*even_range(query_heads, rank, size, "heads"))
        assert {q * kv_heads // query_heads for q in queries} == set(range(first, last))
        assert len(queries) % local_kv_heads(kv_heads, size) == 0


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 2), (2, 3), (6, 4)])
def test_kv_heads_that_do_not_divide(kv_heads: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"num_key_value_heads={kv_heads} and tensor_parallel_size={size}"):
        local_kv_heads(kv_heads, size)


def test_a_size_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="heads=6 does not divide by tensor_parallel_size=4"):
        even_range(6, 0, 4, "heads")


def test_a_shard_takes_ranges_and_padding_of_the_right_tensor_only() -> None:
    shard = Shard((6, 2), 0, ((0, 1), (3, 5)), padding=1)
    assert shard.take(torch.arange(12).view(6, 2)).tolist() == [[0, 1], [6, 7], [8, 9], [0, 0]]
    with pytest.raises(ValueError, match=r"\(5, 2\): expected \(6, 2\)"):
        shard.take(torch.zeros(5, 2))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_by_rows_and_by_columns(bias: bool) -> None:
    torch.manual_seed(0)
    stock, x = nn.Linear(8, 6, bias=bias).requires_grad_(False), torch.randn(3, 8)
    columns = [filled(ColumnParallelLinear(stock, Alone(r, 2), (3 * r, 3 * r + 3)), stock) for r in (0, 1)]
    assert torch.equal(columns[1].weight, stock.weight[3:])
    torch.testing.assert_close(torch.cat([layer(x) for layer in columns], -1), stock(x))

    partial = torch.nn.functional.linear(x[:, :4], stock.weight[:, :4])
    row = filled(RowParallelLinear(stock, Alone(1, 2, [partial]), (4, 8)), stock)
    assert torch.equal(row.weight, stock.weight[:, 4:]) and (row.bias is not None) == bias
    torch.testing.assert_close(row(x[:, 4:]), stock(x))  # a bias added by each rank would be there twice


def test_layers_whose_neighbours_have_whole_rows() -> None:
    torch.manual_seed(0)
    stock, x = nn.Linear(8, 6).requires_grad_(False), torch.randn(2, 3, 8)
    rows = stock(x).split(3, -1)
    gathering = filled(GatheringLinear(stock, Alone(0, 2, [rows[1]]), (0, 3)), stock)
    torch.testing.assert_close(gathering(x), stock(x))
    other = nn.functional.linear(x[..., :4], stock.weight[:, :4])
    splitting = filled(SplittingLinear(stock, Alone(1, 2, [other]), (4, 8)), stock)
    torch.testing.assert_close(splitting(x), stock(x))
    assert torch.equal(filled(ReplicatedLinear(stock, Alone(1, 2)), stock)(x), stock(x))
    for layer in (GatheringLinear(stock, SINGLE, (0, 6)), SplittingLinear(stock, SINGLE, (0, 8))):
        assert torch.equal(filled(layer, stock)(x), stock(x))


def test_embedding_and_head_with_padding() -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(21, 4).requires_grad_(False), nn.Linear(4, 21, bias=True).requires_grad_(False)
    ids, x = torch.tensor([[0, 15, 16, 20]]), torch.randn(2, 3, 4)
    ranks = [Alone(0, 2), Alone(1, 2)]
    parts = [copy.deepcopy(embedding) for _ in ranks]
    for part, group in zip(parts, ranks, strict=True):
        shard_embedding(part, group)
    assert [(len(part.weight), part.first, part.vocab_size) for part in parts] == [(16, 0, 21), (16, 16, 21)]
    assert torch.equal(parts[1].weight[:5], embedding.weight[16:]) and not parts[1].weight[5:].any()
    assert torch.equal(parts[0](ids) + parts[1](ids), embedding(ids))
    assert not parts[0](ids)[0, 2:].any() and not parts[1](ids)[0, :2].any()

    heads = [filled(VocabParallelHead(head, group), head) for group in ranks]
    assert [(part.first, part.num_real) for part in heads] == [(0, 16), (16, 5)]
    heads[1].group.others = [nn.functional.linear(x, heads[0].weight, heads[0].bias)]
    assert heads[1](x).shape == (2, 3, 21)
    torch.testing.assert_close(heads[1](x), head(x))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_sliced_inside_each_of_them(implementation: str) -> None:
    stock = family_model("qwen3-moe").requires_grad_(False).model.layers[0].mlp.experts
    stock.config._experts_implementation = implementation
    x = torch.randn(5, 64)
    chosen, weights = torch.tensor([[0, 1], [2, 3], [0, 7], [4, 5], [6, 1]]), torch.rand(5, 2)
    parts = []
    for rank in range(2):
        part = copy.deepcopy(stock)
        shard_experts(part, Alone(rank, 2), (16 * rank, 16 * rank + 16))
        half = slice(16 * rank, 16 * rank + 16)
        gate, up = stock.gate_up_proj.chunk(2, 1)
        assert torch.equal(part.gate_up_proj, torch.cat([gate[:, half], up[:, half]], 1))
        assert torch.equal(part.down_proj, stock.down_proj[:, :, half])
        parts.append(part)
    parts[1].group.others = [parts[0](x, chosen, weights)]
    torch.testing.assert_close(parts[1](x, chosen, weights), stock(x, chosen, weights), rtol=1e-5, atol=1e-5)
    assert type(parts[0]) is type(parts[1]) is sharded_class(type(stock))
    assert stock_class(type(parts[0])) is type(stock) is stock_class(type(stock))


def test_one_rank_is_the_stock_layer() -> None:
    torch.manual_seed(0)
    stock, x = nn.Linear(8, 6).requires_grad_(False), torch.randn(3, 8)
    embedding, ids = nn.Embedding(21, 4).requires_grad_(False), torch.tensor([3, 20])
    column, row = ColumnParallelLinear(stock, SINGLE, (0, 6)), RowParallelLinear(stock, SINGLE, (0, 8))
    for layer in (column, row, VocabParallelHead(stock, SINGLE)):
        assert torch.equal(filled(layer, stock)(x), stock(x))
        assert not is_sharded(layer)
    whole = embedding(ids)
    shard_embedding(embedding, SINGLE)
    assert torch.equal(embedding(ids), whole)
    assert is_sharded(ColumnParallelLinear(stock, ParallelGroup(0, 2), (0, 3)))


def test_parameters_have_stocks_names_and_copies_keep_the_group() -> None:
    group = ParallelGroup(0, 2)
    layer = RowParallelLinear(nn.Linear(8, 6), group, (0, 4))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert copy.deepcopy(layer).group is group
    with pytest.raises(TypeError, match="sharded over several ranks cannot be pickled"):
        pickle.dumps(layer)
