"""Complete a file or directory of prompts, Parquet or JSON lines, through Ray Data actors; a second run continues.

    python examples/ray_batch.py --output /tmp/completions                       # the tiny model, one actor, on a CPU
    python examples/ray_batch.py --input prompts.parquet --output out --model Qwen/Qwen3-32B \\
        --num-actors 4 --tensor-parallel-size 2                                  # 8 GPUs

Needs `pip install 'hf-paged[ray]'`. On a cluster, input, output and model have to be paths that every node sees, and
RAY_ADDRESS names the cluster; otherwise Ray is started on this machine.

Every row has an id of its own. A block of finished rows becomes one file of the output directory, under a name made of
its ids, written aside and renamed: a file is there whole or not at all, and a block that Ray repeats (its actor died)
replaces its own file. A run first reads which ids are there and generates the others only. So after any number of
interrupted runs and one that ended well every id is in the output exactly once; rows that were under way when a run was
interrupted are generated again, to the same tokens. A row that failed is there with its error, and counts as done.
Only one run at a time may write to a directory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import ray
import xxhash

from hf_paged.ray_data import generate_dataset

HERE = Path(__file__).parent
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl"}


def main(argv: list[str] | None = None) -> int:
    """Returns how many rows were generated."""
    args = parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    if not ray.is_initialized():
        ray.init()
    dataset = read(args.input)
    done = finished_ids(args.output, args.id_column)
    total = Counter(column(dataset, args.id_column))
    if bad := [key for key, count in total.items() if count > 1 or not isinstance(key, (int, str))]:
        raise ValueError(f"--id-column {args.id_column}: expected integers or strings, no two alike; found {bad[:5]}")
    todo = len(total.keys() - done)
    print(f"{len(total)} rows, {len(total) - todo} of them in {args.output} already")
    if todo == 0:
        return 0
    settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.temperature > 0:
        settings |= {"do_sample": True, "temperature": args.temperature}
    made = generate_dataset(
        without(dataset, args.id_column, done), args.model, num_actors=args.num_actors, batch_size=args.batch_size,
        tensor_parallel_size=args.tensor_parallel_size, prompt_column=args.prompt_column, id_column=args.id_column,
        generate_kwargs=settings, seed=args.seed, dtype=args.dtype,
    )
    written = made.map_batches(
        write_file, batch_size=None, batch_format="pyarrow",
        fn_kwargs={"output": str(args.output.absolute()), "format": args.format, "id_column": args.id_column},
    )
    rows = [row for batch in written.iter_batches(batch_format="pyarrow") for row in batch.to_pylist()]
    count, failed = sum(row["rows"] for row in rows), sum(row["failed"] for row in rows)
    print(f"{count} rows generated, {failed} of them with an error; {len(rows)} files added to {args.output}")
    return count


def read(path: Path) -> ray.data.Dataset:
    """The dataset in a file, or in the files of a directory, by their suffix."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in FORMATS and f.name[0] != ".")
    formats = {FORMATS.get(file.suffix) for file in files}
    if formats == {"parquet"}:
        return ray.data.read_parquet([str(file.absolute()) for file in files])
    if formats == {"jsonl"}:
        return ray.data.read_json([str(file.absolute()) for file in files], file_extensions=None)
    raise ValueError(f"--input {path}: expected .parquet or .jsonl files, all of one kind")


def column(dataset: ray.data.Dataset, name: str) -> list[Any]:
    return [key for batch in dataset.select_columns([name]).iter_batches(batch_format="pyarrow")
            for key in batch.column(name).to_pylist()]


def finished_ids(output: Path, id_column: str) -> set[Any]:
    """The ids in the output's files. What an interrupted run left half-written is removed."""
    for leftover in output.glob(".part-*"):
        leftover.unlink()
    done: set[Any] = set()
    for file in output.glob("part-*"):
        if file.suffix == ".parquet":
            done.update(pyarrow.parquet.read_table(file, columns=[id_column]).column(id_column).to_pylist())
        else:
            # Not splitlines, for which texts hold other ends of lines, such as U+2028.
            done.update(json.loads(line)[id_column] for line in file.read_text().split("\n") if line)
    return done


def without(dataset: ray.data.Dataset, id_column: str, done: set[Any]) -> ray.data.Dataset:
    """`dataset` less the rows whose ids are in `done`, which every task that reads it gets a copy of."""
    if not done:
        return dataset
    ids = ray.put(done)

    def drop(batch: pa.Table) -> pa.Table:
        found = ray.get(ids)
        return batch.filter(pa.array([key not in found for key in batch.column(id_column).to_pylist()], pa.bool_()))

    return dataset.map_batches(drop, batch_format="pyarrow")


def write_file(batch: pa.Table, output: str, format: str, id_column: str) -> pa.Table:
    """Write the rows as one file; returns how many there were and how many of them failed."""
    if batch.num_rows == 0:
        return pa.table({"rows": pa.array([], pa.int64()), "failed": pa.array([], pa.int64())})
    name = xxhash.xxh3_128_hexdigest(json.dumps(sorted(batch.column(id_column).to_pylist())).encode())
    path = Path(output) / f"part-{name}.{format}"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    if format == "parquet":
        pyarrow.parquet.write_table(batch, aside)
    else:
        # What a column may hold besides JSON's own types is a time: read_json makes them of text.
        times = {"ensure_ascii": False, "default": lambda value: value.isoformat()}
        lines = (json.dumps(row, **times) for row in batch.to_pylist())
        aside.write_text("\n".join(lines) + "\n")
    os.replace(aside, path)
    failed = len(batch) - batch.column("completion_error").null_count
    return pa.table({"rows": [len(batch)], "failed": [failed]})


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Complete the prompts of a dataset on a Ray cluster.")
    parser.add_argument("--input", type=Path, default=HERE / "prompts.jsonl", help="a file or directory")
    parser.add_argument("--output", type=Path, required=True, help="a directory, made if it is not there")
    parser.add_argument("--format", choices=["parquet", "jsonl"], default="jsonl", help="of the output")
    parser.add_argument("--model", default=str(HERE / "models" / "tiny-qwen3"), help="a checkpoint or a model id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--id-column", default="id", help="integers or strings, no two alike")
    parser.add_argument("--prompt-column", default="prompt", help="text, token ids or chats")
    parser.add_argument("--num-actors", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of each actor")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows an actor works on at a time, and of a file")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
