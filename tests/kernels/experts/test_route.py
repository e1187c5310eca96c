"""route: the experts that stock's routers choose, of equal ones the first, and the order of all pairs."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.experts import route as module
from hf_paged.kernels.experts.route import (
    RouterRule,
    RouterWeights,
    grouped,
    new_arrivals,
    route,
    route_reference,
    route_triton,
)

KINDS = {
    "softmax": RouterRule("softmax", 4, norm=True),
    "softmax without norm": RouterRule("softmax", 3),
    "softmax in float32": RouterRule("softmax", 2, norm=True, keeps_float32=True),
    "topk_softmax": RouterRule("topk_softmax", 4),
    "sigmoid": RouterRule("sigmoid", 4, norm=True),
    "sigmoid in groups": RouterRule("sigmoid", 4, norm=True, exact_logits=True, epsilon=1e-20, scaling=1.5,
                                    num_groups=4, topk_group=2),
}


def make(seed, rows, experts, width, dtype, rule, device="cpu", ties=False):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g)
    weight = torch.randn(experts, width, generator=g) * width**-0.5
    if ties:  # of several experts each
        weight = weight[torch.arange(experts) // 3]
    bias = torch.randn(experts, generator=g) if rule.kind == "topk_softmax" and not ties else None
    correction = torch.randn(experts, generator=g).abs() if rule.kind == "sigmoid" and not ties else None
    wide = torch.full((rows, width + 8), torch.nan)
    wide[:, :width] = x
    router = RouterWeights(weight.to(device, dtype), None if bias is None else bias.to(device, dtype),
                           None if correction is None else correction.to(device))
    return wide.to(device, dtype)[:, :width], router


def check_order(routes, num_experts):
    """Every pair with an expert is in the order once, in its expert's group, rows ascending."""
    order, groups = grouped(routes.experts, num_experts)
    assert torch.equal(routes.groups[:, 0], groups[:, 0])
    hit = groups[:, 0] >= 0
    assert torch.equal(routes.groups[hit], groups[hit])
    count = int(groups[hit][:, 2].sum())
    assert count == int((routes.experts >= 0).sum())
    assert torch.equal(routes.order[:count], order[:count])


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "experts", "dtype"), [(1, 16, torch.float16), (20, 24, torch.float16),
                                                        (70, 8, torch.float32), (270, 40, torch.float16)])
def test_kernel(kind, rows, experts, dtype):
    rule = KINDS[kind]
    x, router = make(rows, rows, experts, 144, dtype, rule)
    arrivals = new_arrivals(torch.device("cpu"))
    lengths = torch.ones(rows, dtype=torch.int32)
    lengths[1::3] = 0
    for given in (None, lengths):
        found = route_triton(x, router, rule, arrivals, given)
        expected = route_reference(x, router, rule, arrivals, given)
        same = (found.experts == expected.experts).all(1)
        assert same.float().mean() >= 0.98  # products that are added up in another order
        assert found.scores.dtype == expected.scores.dtype
        size = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(found.scores[same], expected.scores[same], **size)
        check_order(found, experts)
        assert not arrivals.any()


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [2, 9, 16])
def test_pairs_that_are_ordered_where_they_are_chosen(monkeypatch, rows):
    monkeypatch.setattr(module, "ORDER_OF_FEW", "rows")
    x, router = make(1, rows, 12, 32, torch.float16, KINDS["softmax"])
    arrivals, lengths = new_arrivals(torch.device("cpu")), torch.ones(rows, dtype=torch.int32)
    lengths[1] = 0
    check_order(route_triton(x, router, KINDS["softmax"], arrivals, lengths), 12)
    assert not arrivals.any()


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [100, 300])
def test_pairs_of_more_chunks_than_one_tile_holds(monkeypatch, rows):
    monkeypatch.setattr(module, "_MOST_CHOICES", 32)
    x, router = make(1, rows, 12, 32, torch.float16, KINDS["softmax"])
    arrivals = new_arrivals(torch.device("cpu"))
    check_order(route_triton(x, router, KINDS["softmax"], arrivals), 12)
    assert not arrivals.any()


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_lower_numbers(kind):
    rule = KINDS[kind]
    x, router = make(3, 9, 12, 64, torch.float16, rule, ties=True)
    arrivals = new_arrivals(torch.device("cpu"))
    found, expected = (run(x, router, rule, arrivals) for run in (route_triton, route_reference))
    assert torch.equal(found.experts, expected.experts)


@pytest.mark.interpreted
def test_rows_of_nan_have_experts_within_bounds():
    rule = KINDS["softmax"]
    x, router = make(3, 4, 12, 64, torch.float16, rule)
    x[1] = torch.nan
    arrivals = new_arrivals(torch.device("cpu"))
    found = route_triton(x, router, rule, arrivals)
    assert ((found.experts >= 0) & (found.experts < 12)).all()
    others = torch.tensor([0, 2, 3])
    assert torch.equal(found.experts[others], route_reference(x[others], router, rule).experts)


def test_padding_rows_have_no_experts():
    rule = KINDS["softmax"]
    x, router = make(3, 4, 12, 64, torch.float32, rule)
    arrivals = new_arrivals(torch.device("cpu"))
    found = route(x, router, rule, arrivals, torch.tensor([5, 0, 1, 0], dtype=torch.int32))
    assert (found.experts[1::2] == -1).all()
    assert (found.experts[::2] >= 0).all()
    check_order(found, 12)
