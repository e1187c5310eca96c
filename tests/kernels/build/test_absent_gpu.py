"""Tensors that count as those of a GPU that is not there."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_paged.kernels.build.absent_gpu import DEVICE, CountsAsGpu, answers_of, gpu_model, place_as_on_gpu


def test_tensors_answer_that_they_lie_on_the_gpu():
    with CountsAsGpu():
        made, meta = torch.ones(2, device=DEVICE), torch.ones(2, device="meta")
        answers = [(one.device, one.is_cuda, one.is_cpu) for one in (made, made.to("cuda"), meta)]
    assert answers == [(DEVICE, True, False), (DEVICE, True, False), (torch.device("meta"), False, False)]
    assert made.device.type == "cpu"


def test_products_have_their_shape_and_cost_nothing():
    x, weight = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(5, 4, dtype=torch.bfloat16)
    with CountsAsGpu():
        product, rows = F.linear(x, weight), F.embedding(torch.tensor([[1, 2]]), weight)
        together, numbers = torch.cat([x, x], dim=1), torch.cat([torch.tensor([1]), torch.tensor([2])])
        copied = torch.zeros(2).copy_(torch.ones(2))
    assert product.shape == (3, 5) and product.dtype == torch.bfloat16 and not product.any()
    assert rows.shape == (1, 2, 4) and together.shape == (3, 8) and not together.any() and not copied.any()
    assert numbers.tolist() == [1, 2]


def test_an_upload_is_aligned_whatever_it_was_cut_from():
    host = torch.arange(9)[1:]
    with CountsAsGpu():
        uploaded = host.pin_memory().to(DEVICE)
    assert uploaded.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and uploaded.data_ptr() % 16 == 0 != host.data_ptr() % 16


def test_large_tensors_lie_where_a_gpu_would_place_them():
    model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16)
    place_as_on_gpu(model)
    with CountsAsGpu():
        caches = [torch.empty(300, 16, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
        small = torch.empty((2, 3), device=DEVICE)
    assert not any(one.data_ptr() % (2 << 20) for one in (model.weight, *caches))
    assert model.weight.untyped_storage().nbytes() == model.weight.nbytes and model.weight.is_contiguous()
    assert [*map(torch.Tensor.size, caches)] == [(300, 16, 2, 128)] * 3 and small.shape == (2, 3)


def test_a_gpu_may_have_another_number_of_multiprocessors_or_memory():
    assert gpu_model(90).num_multiprocessors == 132
    assert gpu_model(90, 114) == gpu_model(90)._replace(num_multiprocessors=114)
    assert gpu_model(90, memory=141 << 30) == gpu_model(90)._replace(memory=141 << 30)
    with pytest.raises(ValueError, match="sm=91"):
        gpu_model(91)


def test_what_no_description_answers_is_refused():
    """A new question to a GPU fails on a machine without one as on a machine with another one."""
    answers = answers_of(gpu_model(90))
    functions = {name for name, value in vars(torch.cuda).items() if callable(value) and not isinstance(value, type)
                 and value.__module__.startswith("torch.cuda") and not name.startswith("_")}
    assert len(functions) > 50 and functions == answers.keys() - {"device", "Event"}
    assert answers["mem_get_info"](DEVICE) == (79 << 30, 79 << 30)
    assert answers["get_device_properties"](DEVICE).total_memory == 79 << 30
    for name in ("max_memory_allocated", "get_device_name", "ipc_collect"):
        with pytest.raises(RuntimeError, match=f"torch.cuda.{name}: expected no question"):
            answers[name](DEVICE)
