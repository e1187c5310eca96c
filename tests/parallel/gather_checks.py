"""What ranks run in test_gather.py: parts are cut off tensors that every rank makes from the same seed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_paged.parallel import rendezvous
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.rendezvous import Gatherer, GatherShard

# Shape, cut along, dtype of the parts, dtype of the whole.
CASES = [
    ((7, 3), 0, torch.float32, torch.float32),
    ((1, 5), 0, torch.float32, torch.bfloat16),  # most ranks have nothing
    ((12,), 0, torch.bfloat16, torch.bfloat16),
    ((6, 8), 1, torch.float32, torch.bfloat16),
    ((4, 6), None, torch.float32, torch.float16),
    ((2, 3, 4), 0, torch.float32, torch.float32),
    ((4, 4), None, torch.int64, torch.int64),
    ((9, 2), 0, torch.int64, torch.int64),
]


def gather_all(group: ParallelGroup, bucket_bytes: int) -> dict[str, object]:
    """Are the wholes right at first, and after the parts changed, in the same memory? And what was sent?"""
    generator, sent = torch.Generator().manual_seed(0), []
    wholes = [torch.randint(-99, 99, shape, generator=generator).to(dtype) for shape, _, dtype, _ in CASES]
    wholes = [w + torch.randn(w.shape, generator=generator) if w.is_floating_point() else w for w in wholes]
    wholes = [w.to(dtype) for w, (_, _, dtype, _) in zip(wholes, CASES, strict=True)]
    parts = []
    for whole, (_, dim, _, target) in zip(wholes, CASES, strict=True):
        local = whole if dim is None else _chunk(whole, group.size, dim)[group.rank]
        empty = torch.full(whole.shape, 77).to(target)
        parts.append(GatherShard(local.clone(), empty, dim or 0, None if dim is None else dist.group.WORLD))
    original = rendezvous._all_gather

    def counted(out: torch.Tensor, own: torch.Tensor, **kwargs: object) -> object:
        sent.append(out.nbytes)
        return original(out, own, **kwargs)

    rendezvous._all_gather = counted
    gatherer = Gatherer(parts, bucket_bytes)
    gatherer()
    found = {"first": all(_same(p.whole, w) for p, w in zip(parts, wholes, strict=True)), "sent": list(sent)}
    places = [part.whole.data_ptr() for part in parts]
    for part in parts:
        part.local.mul_(3)
    gatherer()
    rendezvous._all_gather = original
    found["again"] = all(_same(p.whole, w * 3) for p, w in zip(parts, wholes, strict=True))
    found["in_place"] = places == [part.whole.data_ptr() for part in parts]
    return found


def _chunk(whole: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    chunks = list(torch.chunk(whole, size, dim))
    return chunks + [whole.narrow(dim, 0, 0)] * (size - len(chunks))


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected.to(found.dtype))
