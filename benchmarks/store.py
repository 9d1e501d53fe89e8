"""What the store costs, on rows of 128 response tokens and 4 turns.

    python -m benchmarks.store write   MB/s of appended batches (local folder, fsync included) over those of
                                       `pyarrow.parquet.write_table` with the same options and one fsync a file
    python -m benchmarks.store read    rows/s to TensorDicts over `pyarrow.parquet.read_table` of the same columns,
                                       and over padded batches by Hugging Face `datasets` and `pad_sequence`
    python -m benchmarks.store scale   open, plan a resume and stream the first batch of 1,000 shards of 20 commits;
                                       bytes a step of a conversation of 20 turns over those of one of 1 turn
    python -m benchmarks.store tail    seconds from a commit to the reader, locally and on S3

Both sides of a ratio run in turn; it is the median of three.
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmcollect import open_run
from llmcollect.batch import trajectories_to_table
from llmcollect.run import RunSpec
from llmcollect.store import Run, ShardWriter, create_or_check_run
from llmcollect.store.commit import WRITE_OPTIONS
from llmcollect.store.files import Files, LocalFiles, open_files
from llmcollect.types import Step, Trajectory
from tests.servers import s3

TOKENS, TURNS, REPEATS = 128, 4, 3


def spec(num_shards: int = 1, num_groups: int = 1_000_000) -> RunSpec:
    """A run of so many shards."""
    return RunSpec.parse(
        {
            "envs": [{"target": "benchmarks.simulated:InstantEnv"}],
            "policies": [{"target": "benchmarks.simulated:InstantPolicy"}],
            "num_groups": num_groups,
            "num_shards": num_shards,
        }
    )


def trajectory(number: int, rng: np.random.Generator, turns: int = TURNS, tokens: int = TOKENS) -> Trajectory:
    """As a small model and an env of short questions leave it."""
    steps = []
    for turn in range(turns):
        ids = rng.zipf(1.3, tokens) % 49_000
        text = " ".join(f"w{i}" for i in ids[: tokens * 3 // 4])
        steps.append(
            Step(
                step=turn,
                prompt_ids=(rng.zipf(1.3, 24) % 49_000).tolist(),
                response_ids=ids.tolist(),
                response_logprobs=(-rng.exponential(1.0, tokens)).astype(np.float32).tolist(),
                policy_versions=[(0, tokens)],
                messages='[{"role":"user","content":"What comes next, and why is that so?"}]',
                response_text=text,
                observation='[{"role":"user","content":"Look at it once more, please."}]',
                reward=float(rng.random()),
                terminated=turn == turns - 1,
                finish_reason="stop",
                info='{"score": 0.5}',
                seed=int(rng.integers(2**32)),
                started_at=1_700_000_000_000_000 + turn,
                generated_at=1_700_000_000_100_000 + turn,
                finished_at=1_700_000_000_200_000 + turn,
            )
        )
    return Trajectory(number, number, 0, "InstantEnv", number, "p", 0, '{"index": 1, "seed": 2}', steps)


def table_of(first: int, count: int, **shape: int) -> pa.Table:
    """Rows of so many trajectories."""
    rng = np.random.default_rng(first)
    made = [trajectory(number, rng, **shape) for number in range(first, first + count)]
    return trajectories_to_table(made, run="r", shard=0, writer="w")


def writer_at(root: str | Path, run: RunSpec, shard: int = 0) -> ShardWriter:
    """A writer of a shard."""
    files = open_files(root)
    return ShardWriter(files, create_or_check_run(files, run, ("m",)), run, shard)


def alternating(first: Callable[[], float], second: Callable[[], float]) -> float:
    """Median of the ratios of two rates, measured in turn after one call of each that does not count."""
    first(), second()
    ratios = []
    for repeat in range(REPEATS):
        rates = {}
        for side in (first, second) if repeat % 2 else (second, first):
            rates[side] = side()
        ratios.append(rates[first] / rates[second])
    print("ratios", [round(ratio, 3) for ratio in ratios])
    return statistics.median(ratios)


def write(commits: int = 24, rows: int = 4096) -> dict[str, float]:
    """See the module."""
    tables = [table_of(index * rows, rows // TURNS) for index in range(commits)]
    size = sum(table.nbytes for table in tables) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        runs = iter(range(100))

        def ours() -> float:
            writer = writer_at(f"{folder}/run-{next(runs)}", spec())
            start = time.perf_counter()
            for table in tables:
                assert writer.append_table(table) is not None
            return size / (time.perf_counter() - start)

        def theirs() -> float:
            place = Path(folder, f"plain-{next(runs)}")
            place.mkdir()
            start = time.perf_counter()
            for number, table in enumerate(tables):
                with open(place / f"{number}.parquet", "wb") as file:
                    pq.write_table(table, file, **WRITE_OPTIONS)
                    file.flush()
                    os.fsync(file.fileno())
            return size / (time.perf_counter() - start)

        ratio = alternating(ours, theirs)
        print(f"ours {ours():,.0f} MB/s, write_table {theirs():,.0f} MB/s")
    return {"ratio": ratio}


def read(commits: int = 16, rows: int = 4096, batch: int = 512) -> dict[str, float]:
    """See the module."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    total = commits * rows
    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/run"
        writer = writer_at(root, spec())
        for index in range(commits):
            writer.append_table(table_of(index * rows, rows // TURNS))
        paths = sorted(str(path) for path in Path(root).glob("steps/*/*.parquet"))

        def ours() -> float:
            start, seen = time.perf_counter(), 0
            for step_batch in open_run(root).steps():
                for part in step_batch.split(batch):
                    seen += len(part.to_tensordict())
            assert seen == total
            return total / (time.perf_counter() - start)

        def arrow() -> float:
            start = time.perf_counter()
            seen = sum(pq.read_table(path).num_rows for path in paths)
            assert seen == total
            return total / (time.perf_counter() - start)

        # The same tensors the other way: rows that hold their whole context, made beforehand.
        contexts = f"{folder}/contexts.parquet"
        pq.write_table(with_contexts(paths[:2]), contexts)

        def hugging_face() -> float:
            from datasets import Dataset

            start, seen = time.perf_counter(), 0
            for part in Dataset(pq.read_table(contexts)).with_format("torch").iter(batch_size=batch):
                lists = {name: list(part[name]) for name in ("prompt", "full", "response", "logprobs")}
                padded = {name: pad_sequence(items, batch_first=True) for name, items in lists.items()}
                ends = {name: torch.tensor([len(item) for item in lists[name]]) for name in ("prompt", "full")}
                place = torch.arange(padded["full"].shape[1])
                attention = place < ends["full"][:, None]
                assistant = attention & (place >= ends["prompt"][:, None])
                full_logprobs = torch.zeros(assistant.shape)
                full_logprobs[assistant] = torch.cat(lists["logprobs"])
                seen += len(part["reward"])
            return seen / (time.perf_counter() - start)

        found = {"ratio": alternating(ours, arrow)}
        print(f"ours {ours():,.0f} rows/s, read_table {arrow():,.0f} rows/s")
        if importlib.util.find_spec("datasets") is not None:
            found["over_datasets"] = alternating(ours, hugging_face)
            print(f"datasets {hugging_face():,.0f} rows/s")
    return found


def with_contexts(paths: list[str]) -> pa.Table:
    """The rows of files with whole contexts instead of what was new."""
    rows = []
    for row in pa.concat_tables([pq.read_table(path) for path in paths]).to_pylist():
        before = rows[-1]["full"] if row["step"] else []
        prompt = before + row["prompt_ids"]
        rows.append(
            {
                "prompt": prompt,
                "full": prompt + row["response_ids"],
                "response": row["response_ids"],
                "logprobs": row["response_logprobs"],
                "reward": row["reward"],
                "terminated": row["terminated"],
            }
        )
    return pa.Table.from_pylist(rows)


class Counting(LocalFiles):
    """Counts what would be requests to an object store: a listing answers a thousand names."""

    requests = 0

    def read(self, path: str) -> bytes | None:
        Counting.requests += 1
        return super().read(path)

    def read_many(self, paths: Any, last: int | None = None) -> list[bytes | None]:
        Counting.requests += len(paths)
        return super().read_many(paths, last)

    def sizes(self, folder: str) -> dict[str, int]:
        found = super().sizes(folder)
        Counting.requests += 1 + len(found) // 1000
        return found


def scale(shards: int = 1000, commits: int = 20) -> dict[str, float]:
    """See the module."""
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, many, per_commit in (("half", shards // 2, 1), ("whole", shards, 1), ("rows", shards // 2, 16)):
            root, run = f"{folder}/{name}", spec(many)
            fill_shards(root, run, commits, per_commit)
            Counting.requests = 0
            seconds, requests = opened(Counting(root), run)
            results |= {f"seconds_{name}": round(seconds, 2), f"requests_{name}": requests}
            print(f"{many} shards of {commits} commits of {per_commit} rows: {seconds:.2f} s, {requests} requests")
        sizes = [bytes_a_step(f"{folder}/{turns}", turns) for turns in (1, 20)]
        print(f"bytes a step: {sizes[0]:.0f} with 1 turn, {sizes[1]:.0f} with 20")
    return {"ratio": sizes[1] / sizes[0], **results}


def fill_shards(root: str, run: RunSpec, commits: int, per_commit: int) -> None:
    """So many commits of short trajectories in each shard of a run."""
    files = open_files(root)
    record = create_or_check_run(files, run, ("m",))
    table = table_of(0, per_commit, turns=1, tokens=4)
    table = replaced(table, run=pa.repeat(record.run, per_commit))
    for shard in range(run.num_shards):
        writer = ShardWriter(files, record, run, shard)
        for commit in range(commits):
            numbers = np.arange(per_commit) + commit * per_commit
            groups = pa.array(numbers * run.num_shards + shard)
            own = pa.repeat(pa.scalar(shard, pa.int32()), per_commit)
            writer.append_table(replaced(table, trajectory=groups, group=groups, shard=own))


def replaced(table: pa.Table, **columns: pa.Array) -> pa.Table:
    """The table with other values in some columns."""
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)
    return table


def opened(files: Files, run: RunSpec) -> tuple[float, int]:
    """Seconds and requests of opening a run, planning its resume, and the first batch."""
    start = time.perf_counter()
    record = Run(files).record
    for shard in range(run.num_shards):
        ShardWriter(files, record, run, shard).catch_up()
    first = next(Run(files).steps())
    assert len(first)
    return time.perf_counter() - start, Counting.requests


def bytes_a_step(root: str, turns: int, steps: int = 4000) -> float:
    """On disk."""
    writer_at(root, spec()).append_table(table_of(0, steps // turns, turns=turns))
    return sum(path.stat().st_size for path in Path(root).glob("steps/*/*.parquet")) / steps


def tail(commits: int = 40, poll_seconds: float = 0.5) -> dict[str, Any]:
    """See the module."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        local = delays(f"{folder}/run", commits, poll_seconds)
        results |= {"local_median_s": statistics.median(local), "local_max_s": max(local)}
        with s3.running(Path(folder) / "server") as environment:
            os.environ.update(environment)
            import s3fs

            s3fs.S3FileSystem().mkdir("bucket")
            remote = delays("s3://bucket/run", commits, poll_seconds)
        results |= {"s3_median_s": statistics.median(remote), "s3_max_s": max(remote)}
    worst = max(results["local_median_s"], results["s3_median_s"])
    return {"ratio": worst / poll_seconds, "polls_per_s": 1 / poll_seconds, "s3_server": s3.NAME, **results}


def delays(root: str, commits: int, poll_seconds: float) -> list[float]:
    """Seconds from the end of each append to the reader's hands, at commits 0.1 to 1.2 s apart."""
    writer = writer_at(root, spec())
    tables = [table_of(index * 64, 64) for index in range(commits)]
    pauses = np.random.default_rng(0).uniform(0.1, 1.2, commits)
    written: list[float] = []

    def write_all() -> None:
        for table, pause in zip(tables, pauses, strict=True):
            time.sleep(pause)
            written.append(0.0)
            writer.append_table(table)
            written[-1] = time.perf_counter()
        writer.end()

    thread = threading.Thread(target=write_all)
    thread.start()
    seen = [time.perf_counter() for _ in open_run(root).tail(poll_seconds=poll_seconds)]
    thread.join()
    found = [max(0.0, got - put) for got, put in zip(seen, written, strict=True)]
    print(f"{root}: median {statistics.median(found):.3f} s, worst {max(found):.3f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "read", "scale", "tail"])
    options = parser.parse_args()
    print(json.dumps({"write": write, "read": read, "scale": scale, "tail": tail}[options.what]()))


if __name__ == "__main__":
    main()
