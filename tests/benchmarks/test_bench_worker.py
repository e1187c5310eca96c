"""Which runs of a row count."""

import pytest
from bench_worker import measure
from workloads import make_workload

JOB = {"scale": 0.02, "device": "cpu", "model": "tiny", "warmup": 1, "runs": 2, "budget": 100.0,
       "ceilings": {"copy_tb_s": 1.0, "gemm_tflop_s": 1.0}}
ROW = {"workload": "batch 4", "overrides": {}}


class Counted:
    """Every run takes a second more than the one before; `settle` waits for ten minutes."""

    def __init__(self, comes):
        self.comes, self.runs, self.now = comes, 0, 0.0
        workload = make_workload(ROW["workload"], JOB["scale"])
        self.lengths = [n for n in workload.output_lengths for _ in range(workload.samples)]

    def open(self, *_):
        return None

    def prepare(self, workload):
        pass

    def run(self, workload):
        self.runs += 1
        self.now += self.runs
        return self.lengths

    def settle(self):
        self.now += 600.0
        return self.comes

    def stats(self):
        return {}


@pytest.mark.parametrize(("comes", "counted"), [(False, [2.0, 3.0]), (True, [3.0, 4.0])])
def test_what_was_compiled_in_the_background_is_waited_for_and_taken_before_a_run_counts(monkeypatch, comes, counted):
    engine = Counted(comes)
    monkeypatch.setattr("bench_worker.time.perf_counter", lambda: engine.now)
    figures = measure(engine, JOB, ROW)
    tokens = figures["output_tokens"]
    assert [tokens / rate for rate in figures["runs"]] == pytest.approx(counted)
    assert tokens / figures["first_run"] == pytest.approx(1.0)


def test_without_warm_up_runs_nothing_is_waited_for(monkeypatch):
    engine = Counted(True)
    monkeypatch.setattr("bench_worker.time.perf_counter", lambda: engine.now)
    measure(engine, {**JOB, "warmup": 0}, ROW)
    assert engine.runs == 2 and engine.now == 1 + 2
