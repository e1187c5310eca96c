"""all_reduce: the reference's sum to the bit on every rank, alone and with residual add and RMSNorm.

Without GPUs the kernels run in Triton's interpreter, all ranks in one process and one after the other: nobody waits,
so every rank runs three times, and the last time finds what the others wrote before. The gpu tests run
`all_reduce_ranks.py`, a process a rank.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exactness import assert_equal
from pairs import every_pair

from hf_paged.kernels.comm._peers import MAX_PROGRAMS, SIGNAL_BYTES, Peers, buffer_bytes, empty_buffer
from hf_paged.kernels.comm.all_reduce import (
    ALGORITHMS,
    FASTEST,
    Algorithm,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_reference,
    choose_algorithm,
    choose_algorithm_for,
)
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm_reference, add_rms_norm_triton

EPS = 1e-6
POISON = 0x5A
every_algorithm = pytest.mark.parametrize(
    "how", ALGORITHMS, ids=["one-posted", "one-signalled", "two-posted", "two-signalled"]
)


def peers_in_one_process(size, capacity, programs=MAX_PROGRAMS):
    buffers = tuple(torch.full((buffer_bytes(capacity),), POISON, dtype=torch.uint8) for _ in range(size))
    for buffer in buffers:
        buffer[:SIGNAL_BYTES] = 0
    abort = torch.zeros(1, dtype=torch.int64)
    return [Peers(buffers, torch.zeros(programs, dtype=torch.int64), abort, r, capacity) for r in range(size)]


def on_all_ranks(peers, run):
    """`run(rank, peers)` as one call: once for the inputs, once for the sums, once for the results."""
    for _ in range(2):
        for rank, mine in enumerate(peers):
            before = mine.epochs.clone()
            run(rank, mine)
            mine.epochs.copy_(before)
    return [run(rank, mine) for rank, mine in enumerate(peers)]


def make(seed, size, shape, dtype):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=g) * 10 ** (rank % 3)).to(dtype) for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference_adds_in_rank_order_and_rounds_once(dtype):
    big, one = torch.finfo(dtype).max / 2, torch.tensor([1.0], dtype=dtype)
    parts = [one * big, one * 3, one * -big]
    in_float = torch.tensor([0.0])
    for part in parts:
        in_float += part.float()
    assert_equal(all_reduce_reference(parts), in_float.to(dtype))
    # 1 + 3/4 ulp + 3/4 ulp: rounding after each addition would give 1 + 2 ulp.
    ulp = torch.finfo(dtype).eps
    if dtype != torch.float32:
        assert_equal(all_reduce_reference([one, one * 0.75 * ulp, one * 0.7 * ulp]), one + ulp)


def test_the_fused_reference_rounds_the_sum_before_the_residual():
    """What the two ops give one after the other, which is not what one rounding of everything would give."""
    parts, (residual,) = make(1, 4, (3, 64), torch.bfloat16), make(2, 1, (3, 64), torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    normed, summed = add_rms_norm_reference(all_reduce_reference(parts), residual, weight, EPS)
    expected = add_rms_norm_reference(all_reduce_reference(parts), residual, weight, EPS)
    assert_equal(normed, expected[0])
    assert_equal(summed, expected[1])
    at_once = (sum(p.float() for p in parts) + residual.float()).bfloat16()
    assert not torch.equal(summed, at_once)


def every_algorithm_but_few_of_eight(cases, of_eight):
    """Each case by each algorithm, but those of eight ranks, the last, which take as long as all others."""
    return [*every_pair(cases[:-1], ALGORITHMS), *every_pair(cases[-1:], of_eight)]


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("size", "shape", "dtype", "programs", "how"), every_algorithm_but_few_of_eight([
    pytest.param(2, (1, 40), torch.float16, 128), pytest.param(3, (17, 1111), torch.float16, 2),
    pytest.param(4, (3, 1000), torch.float32, 128), pytest.param(8, (1, 300), torch.float16, 128),
], ALGORITHMS[:1]))
def test_interpreted_sum(size, shape, dtype, programs, how, monkeypatch):
    """Several calls over the same buffers, of shapes with more and fewer programs; buffers start as garbage."""
    monkeypatch.setattr("hf_paged.kernels.comm.all_reduce.MAX_PROGRAMS", programs)
    peers = peers_in_one_process(size, 1 << 16, programs)
    for seed, rows in enumerate([shape, (2, 8), shape]):
        parts = make(seed, size, rows, dtype)
        results = on_all_ranks(peers, lambda rank, mine, parts=parts: all_reduce(parts[rank], mine, how))
        for result in results:
            assert_equal(result, all_reduce_reference(parts))
    for mine in peers:
        assert mine.epochs.tolist() == [3] * programs
    for buffer in peers[0].buffers:
        assert not buffer[:SIGNAL_BYTES].any()


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("size", "rows", "width", "dtype", "with_residual", "programs", "how"),
                         every_algorithm_but_few_of_eight([
    pytest.param(2, 1, 64, torch.float16, True, 128), pytest.param(3, 5, 72, torch.float16, True, 2),
    pytest.param(4, 5, 1000, torch.float32, False, 2), pytest.param(3, 3, 72, torch.float16, False, 128),
    pytest.param(8, 3, 64, torch.float32, True, 2),
], ALGORITHMS[1:]))
def test_interpreted_sum_and_norm(size, rows, width, dtype, with_residual, programs, how, monkeypatch):
    """More rows than programs too, and fewer, where others post for them; the norm is add_rms_norm's to the bit."""
    monkeypatch.setattr("hf_paged.kernels.comm.all_reduce.MAX_PROGRAMS", programs)
    monkeypatch.setattr("hf_paged.kernels.comm.all_reduce._MAX_SPREAD", programs // 2)
    peers = peers_in_one_process(size, 1 << 16, programs)
    parts, (wide,) = make(3, size, (rows, width), dtype), make(4, 1, (rows, width + 16), dtype)
    residual = wide[:, 8:-8] if with_residual else None
    weight = make(5, 1, (width,), dtype)[0]
    results = on_all_ranks(
        peers, lambda rank, mine: all_reduce_add_rms_norm(parts[rank], residual, weight, EPS, mine, how)
    )
    expected = add_rms_norm_triton(all_reduce_reference(parts), residual, weight, EPS)
    for normed, summed in results:
        assert_equal(normed, expected[0])
        assert_equal(summed, expected[1])


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
@every_algorithm
def test_interpreted_values_at_the_edges(how):
    """NaN, infinities of both signs, overflow of the sum, sums that cancel, negative zeros."""
    parts = make(6, 3, (2, 48), torch.float16)
    parts[0][0, 3], parts[1][0, 5], parts[2][0, 5] = torch.nan, torch.inf, -torch.inf
    parts[1][1, 7] = -torch.inf
    parts[0][1, 9] = parts[1][1, 9] = torch.finfo(torch.float16).max
    for part in parts:
        part[1, 11] = -0.0
    expected = all_reduce_reference(parts)
    results = on_all_ranks(
        peers_in_one_process(3, 4096), lambda rank, mine: all_reduce(parts[rank], mine, how)
    )
    for result in results:
        assert_equal(result, expected)
        assert_equal(result.signbit(), expected.signbit())


@pytest.mark.interpreted
def test_no_rows_are_no_call():
    (mine, _) = peers_in_one_process(2, 4096)
    empty, weight = torch.empty(0, 64), torch.ones(64)
    assert all_reduce(empty, mine).shape == (0, 64)
    normed, summed = all_reduce_add_rms_norm(empty, None, weight, EPS, mine)
    assert normed.shape == summed.shape == (0, 64)
    assert not mine.epochs.any()


def test_ways_by_size():
    assert set(FASTEST) == set(range(2, 9))
    for size, rising in FASTEST.items():
        limits = [limit for limit, _ in rising]
        assert limits == sorted(set(limits))
        assert [choose_algorithm(size, limit) for limit in limits] == [how for _, how in rising]
        assert [choose_algorithm(size, limit + 1) for limit in limits] == [*(how for _, how in rising[1:]), None]
        assert choose_algorithm(size, 1).posted
        # What peers of the largest capacity take.
        mine = Peers((torch.empty(0),) * size, torch.empty(0), torch.empty(0), 0, max(limits))
        assert all(mine.takes(limit, *how) for limit, how in rising)
    assert choose_algorithm(16, 0) is choose_algorithm(16, 1) is None


def test_a_way_for_a_tensor():
    """None here: not on a GPU."""
    (mine, _) = peers_in_one_process(2, 4096)
    assert choose_algorithm_for(torch.zeros(4, 64), mine) is None


@pytest.mark.each_value
@pytest.mark.interpreted
@every_algorithm
@pytest.mark.parametrize("size", [2, 3])
def test_a_full_input_stays_in_its_place(size, how, monkeypatch):
    """Nothing of the first call, in as many programs as there can be, is where the next one's goes, or past the end."""
    monkeypatch.setattr("hf_paged.kernels.comm.all_reduce.MAX_PROGRAMS", 8)
    monkeypatch.setattr("hf_paged.kernels.comm.all_reduce._MAX_SPREAD", 8)
    monkeypatch.setattr("hf_paged.kernels.comm._peers._PADDING", 8 * size * 16 * 4)
    parts, weight = make(8, size, (15, 136), torch.float32), torch.ones(136)
    capacity = parts[0].nbytes
    if how == Algorithm(1, True):  # a mailbox holds size inputs
        capacity = max(16, -(-(size * 64 * -(-parts[0].nbytes // 64) // 2 - 8 * size * 64) // 16) * 16, capacity)
    peers = peers_in_one_process(size, capacity, 8)
    stage, mailbox = peers[0].stage_bytes, peers[0].mailbox_bytes
    wide = tuple(torch.cat([buffer, torch.full((4096,), POISON, dtype=torch.uint8)]) for buffer in peers[0].buffers)
    peers = [mine._replace(buffers=wide) for mine in peers]
    on_all_ranks(peers, lambda r, mine: all_reduce_add_rms_norm(parts[r], None, weight, EPS, mine, how))
    written = 0
    for buffer in wide:
        _, mail_even, mail_odd, even, odd, gathered, past = buffer.split(
            [SIGNAL_BYTES, mailbox, mailbox, stage, stage, capacity, 4096]
        )
        used, unused = (mail_odd, odd) if how.posted else (odd, mail_odd)
        for other in (mail_even, even, unused, past):
            assert (other == POISON).all()
        written += (used != POISON).sum()
        assert (gathered == POISON).all() == (how != Algorithm(2, False))
    copies = {Algorithm(1, True): size, Algorithm(1, False): 1, Algorithm(2, True): 2, Algorithm(2, False): 1}[how]
    assert written > 0.9 * size * parts[0].nbytes * copies


@pytest.mark.interpreted
@pytest.mark.parametrize("num_shots", [1, 2])
def test_what_was_taken_leaves_its_place_empty(num_shots, monkeypatch):
    """The last rank to run finds everything: its mailboxes are as they were before the first call."""
    monkeypatch.setattr("hf_paged.kernels.comm.all_reduce._MAX_SPREAD", 0)  # of two programs the second runs too late
    peers = peers_in_one_process(3, 1 << 14)
    for buffer in peers[0].buffers:
        empty_buffer(buffer, 1 << 14)
    parts, weight = make(9, 3, (3, 136), torch.float16), torch.ones(136, dtype=torch.float16)
    how = Algorithm(num_shots, True)
    for _ in range(2):
        on_all_ranks(peers, lambda r, mine: all_reduce_add_rms_norm(parts[r], None, weight, EPS, mine, how))
        on_all_ranks(peers, lambda r, mine: all_reduce(parts[r], mine, how))
    mail = peers[0].buffers[2][SIGNAL_BYTES:][: 2 * peers[0].mailbox_bytes]
    assert (mail == 0xFF).all()
    assert not (peers[0].buffers[0][SIGNAL_BYTES:][: 2 * peers[0].mailbox_bytes] == 0xFF).all()  # of later ranks


@pytest.mark.interpreted
@pytest.mark.parametrize("num_shots", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_nan_that_looks_like_an_empty_place_is_posted_as_another(num_shots, dtype):
    """Nobody would ever take it: what peers find is some NaN of other bits."""
    peers, integer = peers_in_one_process(2, 4096), torch.int32 if dtype == torch.float32 else torch.int16
    all_reduce(torch.full((1, 64), -1, dtype=integer).view(dtype), peers[0], Algorithm(num_shots, True))
    mail = peers[0].buffers[1][SIGNAL_BYTES:][: 2 * peers[0].mailbox_bytes].view(integer)
    posted = mail[mail != torch.full((4,), POISON, dtype=torch.uint8).view(integer)[0]]
    assert len(posted) == 64 and not (posted == -1).any() and posted.view(dtype).isnan().all()


def test_how_much_a_way_takes():
    for size in range(2, 9):
        for capacity in (4096, 3 << 20):
            mine = Peers((torch.empty(0),) * size, torch.empty(0), torch.empty(0), 0, capacity)
            for how in ALGORITHMS:
                assert mine.takes(4096 // size, *how)
                assert not mine.takes(capacity + 1, *how)  # where there is room for more in a mailbox, too
            assert mine.takes(capacity, 1, False) and mine.takes(capacity, 2, False) and mine.takes(capacity, 2, True)
    (mine, *_) = peers_in_one_process(3, 24 << 20)
    assert mine.takes(8 << 20, 2, True) and not mine.takes((8 << 20) + 1, 2, True)
    assert mine.takes(24 << 20, 2, False) and mine.takes(5 << 20, 1, True) and not mine.takes(6 << 20, 1, True)
    with pytest.raises(ValueError, match=r"too long for Algorithm\(shots=1, posted=True\).*got 6291520 bytes"):
        all_reduce(torch.zeros((6 << 20) // 64 + 1, 16), mine, Algorithm(1, True))


def test_bad_arguments():
    (mine, _) = peers_in_one_process(2, 4096)
    x, weight = torch.zeros(4, 64), torch.ones(64)
    for arguments, message in [
        ((x.double(), mine), "float64"),
        ((x.t(), mine), "contiguous"),
        ((torch.zeros(257)[1:], mine), "aligned"),
        ((torch.zeros(1025), mine), "4096 bytes"),
        ((x, mine, Algorithm(3, True)), "algorithm"),
    ]:
        with pytest.raises(ValueError, match=message):
            all_reduce(*arguments)
    for arguments, message in [
        ((x, x, weight[1:]), "weight"),
        ((x, x[1:], weight), "shape"),
        ((x, x.half(), weight), "dtype"),
        ((x, x.t().contiguous().t(), weight), "contiguous"),
        ((torch.zeros(4, 62), None, torch.ones(62)), "16-byte"),
    ]:
        with pytest.raises(ValueError, match=message):
            all_reduce_add_rms_norm(*arguments, EPS, mine)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gpu_ranks(size, tmp_path):
    """Exact results, races, graphs, edges and giving up, by `all_reduce_ranks.py` on each of `size` GPUs."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    script = Path(__file__).with_name("all_reduce_ranks.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(size), str(tmp_path / "store")]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(size)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                ranks.append(subprocess.Popen([*command, str(rank)], stdout=out, stderr=out, env=environment))
        codes = [process.wait(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(codes), "\n".join(f"--- rank {r}\n{log.read_text()[-3000:]}" for r, log in enumerate(logs))
