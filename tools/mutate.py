"""Break the package in every way listed in ``mutations.py`` and ``package_mutations.py``; see that its tests notice.

    python tools/mutate.py [--only TEXT] [--tier core|all]

A test of the tier `core`, which is what `make test` runs, has to notice; with `all`, a slow test may. Package and tests
are copied to a temporary directory, one a mutation; the working tree is never changed. Exits with 1 if a mutation
survives or no longer applies, or if the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutations import MUTATIONS, Mutation
from package_mutations import PACKAGE_MUTATIONS, PackageMutation

ROOT = Path(__file__).resolve().parent.parent
CAUGHT, TIMED_OUT = "caught", "timed out"
PACKAGE, TESTS = Path("hf_paged/scheduler"), Path("tests/scheduler")
TIMEOUT_S = 60  # a mutation may well loop for ever; that is noticing, too
PACKAGE_TIMEOUT_S = 240


# What pytest's `-m` picks. The core tier is what pyproject.toml picks where nothing is said.
TIERS = {"core": (), "all": ("-m", "not gpu")}


class Job(NamedTuple):
    """A mutation as it is carried out: in a copy that `prepare` makes, by those tests of `arguments` that -k picks."""

    label: str
    file: Path
    old: str
    new: str
    prepare: Callable[[Path], None]
    arguments: tuple[str, ...]
    select: str
    timeout_s: float


def scheduler_job(mutation: Mutation) -> Job:
    select = mutation.tests or " or ".join(f"test_b{number:02}_" for number in mutation.behaviours)
    label = ",".join(map(str, mutation.behaviours)) or "-"
    return Job(label, PACKAGE / mutation.file, mutation.old, mutation.new, copy_scheduler,
               SCHEDULER_ARGUMENTS, select, TIMEOUT_S)


def package_job(mutation: PackageMutation) -> Job:
    return Job("-", Path("hf_paged") / mutation.file, mutation.old, mutation.new, copy_package,
               (f"tests/{mutation.test_file}",), mutation.tests, PACKAGE_TIMEOUT_S)


# The random machines stay out: a mutation must be caught by a test that says what is wrong. The copy has no conftest
# that would say how long an example may take: Hypothesis' own profile without deadlines does.
SCHEDULER_ARGUMENTS = ("--hypothesis-profile", "ci", "--ignore-glob", str(TESTS / "*machine*"), str(TESTS))


def run_tests(work: Path, arguments: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit status of pytest on the copy under `work`, and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(work), *PATHS]), PYTHONDONTWRITEBYTECODE="1",
               OMP_NUM_THREADS="1")
    try:
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return 1, TIMED_OUT
    return done.returncode, done.stdout + done.stderr


# What the caller added besides this repository: another version of transformers, say.
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT]


def copy_scheduler(work: Path) -> None:
    """A copy of the scheduler and its tests; the rest of the package is not needed, since it imports none of it."""
    _copy(work, PACKAGE, TESTS)
    shutil.copy(ROOT / "tests" / "invariants.py", work / TESTS)
    (work / "hf_paged/__init__.py").write_text("")


def copy_package(work: Path) -> None:
    """A copy of the whole package, its tests, and the models and workloads that they load."""
    _copy(work, *map(Path, ("hf_paged", "tests", "examples", "benchmarks")))


def _copy(work: Path, *folders: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in folders:
        shutil.copytree(ROOT / folder, work / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", work)


def try_mutation(job: Job) -> str:
    """``caught``, or what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        job.prepare(work)
        path = work / job.file
        text = path.read_text()
        if text.count(job.old) != 1:
            return f"NOT APPLICABLE: its text occurs {text.count(job.old)} times"
        path.write_text(text.replace(job.old, job.new))
        status, output = run_tests(work, [*job.arguments, "-k", job.select], job.timeout_s)
    if status == 1:
        return CAUGHT + (" (by the time limit)" if output == TIMED_OUT else "")
    if status == 0:
        return "SURVIVED"
    return f"BROKEN RUN, pytest exits with {status}: {output.strip().splitlines()[-1:]}"


def failure_without_mutations(jobs: list[Job]) -> str | None:
    """What pytest says where the tests of `jobs` do not pass as the code is: once per test file."""
    selections: dict[tuple, list[str]] = {}
    for job in jobs:
        selections.setdefault((job.prepare, job.timeout_s, job.arguments), []).append(job.select)

    def run(item: tuple[tuple, list[str]]) -> tuple[int, str]:
        (prepare, timeout_s, arguments), chosen = item
        select = ["-k", " or ".join(f"({text})" for text in chosen)]
        with tempfile.TemporaryDirectory() as directory:
            prepare(Path(directory))
            return run_tests(Path(directory), [*arguments, *select], 4 * timeout_s)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return next((output for status, output in pool.map(run, selections.items()) if status), None)


def all_jobs(tier: str) -> list[Job]:
    jobs = [*map(scheduler_job, MUTATIONS), *map(package_job, PACKAGE_MUTATIONS)]
    return [job._replace(arguments=(*TIERS[tier], *job.arguments)) for job in jobs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose file, text or selection contains this")
    parser.add_argument("--tier", choices=TIERS, default="core", help="tests that may notice (default: %(default)s)")
    args = parser.parse_args()
    jobs = [job for job in all_jobs(args.tier)
            if args.only in f"{job.file} {job.old} {job.new} {' '.join(job.arguments)} {job.select}"]
    begin = time.time()
    if (output := failure_without_mutations(jobs)) is not None:
        print(output)
        print("the tests fail without any mutation")
        return 1

    verdicts = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for job, verdict in zip(jobs, pool.map(try_mutation, jobs), strict=True):  # as they come: it may be interrupted
            verdicts.append(verdict)
            line = next(a.strip() for a in job.old.splitlines() if a.strip())
            name = job.file.name if PACKAGE in job.file.parents else str(job.file.relative_to("hf_paged"))
            print(f"{job.label:>6}  {name:<36} {line[:72]:<72}  {verdict}", flush=True)
    caught = sum(verdict.startswith(CAUGHT) for verdict in verdicts)
    missing = set(range(1, 23)) - {number for mutation in MUTATIONS for number in mutation.behaviours}
    print(f"{caught} of {len(jobs)} mutations caught in {time.time() - begin:.0f} s", end="")
    print(f"; behaviours without a mutation: {sorted(missing)}" if missing else "; every behaviour has one")
    return int(caught < len(jobs) or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
