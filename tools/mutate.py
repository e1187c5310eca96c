"""Break the scheduler in every way listed in ``tools/mutations.py`` and see that its tests notice.

    python tools/mutate.py [--only TEXT]

Package and tests are copied to a temporary directory, one a mutation; the working tree is never changed. Exits with 1
if a mutation survives or no longer applies, or if the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
CAUGHT, TIMED_OUT = "caught", "timed out"
PACKAGE, TESTS = Path("hf_paged/scheduler"), Path("tests/scheduler")
TIMEOUT_S = 60  # a mutation may well loop for ever; that is noticing, too


def selection(mutation: Mutation) -> str:
    return mutation.tests or " or ".join(f"test_b{number:02}_" for number in mutation.behaviours)


def run_tests(work: Path, select: str) -> tuple[int, str]:
    """Exit status of pytest on the copy under `work`, and its output."""
    # The random machines stay out: a mutation must be caught by a test that says what is wrong.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider",
               "--ignore", str(TESTS / "test_machines.py"), str(TESTS)]  # fmt: skip
    if select:
        command += ["-k", select]
    env = dict(os.environ, PYTHONPATH=str(work), PYTHONDONTWRITEBYTECODE="1")
    try:
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return 1, TIMED_OUT
    return done.returncode, done.stdout + done.stderr


def prepare(work: Path) -> None:
    """A copy of the scheduler and its tests; the rest of the package is not needed, since it imports none of it."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, work / PACKAGE, ignore=ignore)
    shutil.copytree(ROOT / TESTS, work / TESTS, ignore=ignore)
    (work / "hf_paged/__init__.py").write_text("")
    shutil.copy(ROOT / "pyproject.toml", work)


def try_mutation(mutation: Mutation) -> str:
    """``caught``, or what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        path = work / PACKAGE / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            return f"NOT APPLICABLE: its text occurs {text.count(mutation.old)} times"
        path.write_text(text.replace(mutation.old, mutation.new))
        status, output = run_tests(work, selection(mutation))
    if status == 1:
        return CAUGHT + (" (by the time limit)" if output == TIMED_OUT else "")
    if status == 0:
        return "SURVIVED"
    return f"NOT RUN: pytest exited with {status}: {output.strip().splitlines()[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose file, text or selection contains this")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only in f"{m.file} {m.old} {m.new} {selection(m)}"]
    begin = time.time()
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        status, output = run_tests(Path(directory), "")
    if status:
        print(output)
        print("the tests fail without any mutation")
        return 1

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        verdicts = list(pool.map(try_mutation, chosen))
    for mutation, verdict in zip(chosen, verdicts, strict=True):
        label = ",".join(map(str, mutation.behaviours)) or "-"
        line = next(a.strip() for a in mutation.old.splitlines() if a.strip())
        print(f"{label:>6}  {mutation.file:<20} {line[:72]:<72}  {verdict}")
    caught = sum(verdict.startswith(CAUGHT) for verdict in verdicts)
    missing = set(range(1, 23)) - {number for mutation in MUTATIONS for number in mutation.behaviours}
    print(f"{caught} of {len(chosen)} mutations caught in {time.time() - begin:.0f} s", end="")
    print(f"; behaviours without a mutation: {sorted(missing)}" if missing else "; every behaviour has one")
    return int(caught < len(chosen) or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
