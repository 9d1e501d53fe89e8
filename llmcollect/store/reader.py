"""Reading a run: rows, trajectories and records, with bounded memory, and without importing anything that it names."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmcollect.batch import StepBatch
from llmcollect.errors import CorruptFileError
from llmcollect.run import RunSpec
from llmcollect.schema import STEP_SCHEMA
from llmcollect.store import layout
from llmcollect.store.files import Files, open_files
from llmcollect.store.record import COMMIT_KEY, CommitRecord, read_run
from llmcollect.types import GroupRecord


@dataclass(frozen=True, slots=True)
class TokenContext:
    """One unbroken sequence of ids that a policy saw and sampled.

    Attributes:
        token_ids: int64 [T], prompts and responses in order.
        loss_mask: bool [T], True where the id was sampled.
        logprobs: float32 [T], 0 where the id was not sampled, NaN where the policy gave none.
    """

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory read back.

    Attributes:
        reward: Sum of the steps' rewards; None if no step has one.
        messages: The conversation, the env's last answer included.
        contexts: One, or one more for each `context_reset`.
        failure: type, message and traceback if it failed.
    """

    trajectory: int
    group: int
    sample: int
    env: str
    policy: str
    reward: float | None
    terminated: bool
    truncated: bool
    messages: list[dict[str, Any]]
    contexts: list[TokenContext]
    failure: dict[str, Any] | None
    rows: list[dict[str, Any]] = field(repr=False)


class Run:
    """A run that somebody collected, or is collecting. Made by `open_run`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.record = read_run(files)
        self.spec: RunSpec = self.record.parsed_spec()

    def __repr__(self) -> str:
        return f"Run({self._files.root!r}, {self.record.run})"

    def steps(self, include_failed: bool = False) -> Iterator[StepBatch]:
        """The rows, one batch a commit, shard by shard and in commit order.

        Args:
            include_failed: Also the rows of trajectories that failed.

        Raises:
            CorruptFileError: A file is damaged; the message names it.
        """
        for shard in range(self.spec.num_shards):
            number = 0
            while (table := read_commit(self._files, shard, number)) is not None:
                batch = StepBatch(table)
                yield batch if include_failed else batch.without_failed()
                number += 1

    def trajectories(self, include_failed: bool = False) -> Iterator[StoredTrajectory]:
        """Whole trajectories, in the order of `steps`."""
        for batch in self.steps(include_failed):
            rows: list[dict[str, Any]] = []
            for row in batch.to_arrow().to_pylist():
                if rows and row["trajectory"] != rows[0]["trajectory"]:
                    yield _trajectory(rows)
                    rows = []
                rows.append(row)
            if rows:
                yield _trajectory(rows)

    def commits(self) -> Iterator[CommitRecord]:
        """The records of all commits, shard by shard and in order."""
        for shard in range(self.spec.num_shards):
            number = 0
            while (record := read_commit_record(self._files, shard, number)) is not None:
                yield record
                number += 1

    def group_records(self) -> list[GroupRecord]:
        """What has become of each group that has arrived in part or whole, in order; read from footers alone."""
        return _group_records(self.commits(), self.spec.group_size)

    def to_arrow(self, include_failed: bool = False) -> pa.Table:
        """All rows as one table, in memory."""
        tables = [batch.to_arrow() for batch in self.steps(include_failed)]
        return pa.concat_tables(tables) if tables else STEP_SCHEMA.empty_table()

    def to_pandas(self, include_failed: bool = False) -> Any:
        """All rows as a pandas DataFrame, in memory."""
        return self.to_arrow(include_failed).to_pandas()

    def holds(self, num_groups: int) -> bool:
        """Whether every trajectory of a run of this size is in the store."""
        wanted = self.spec.model_copy(update={"num_groups": num_groups})
        found = sum(wanted.planned(record.trajectories) for record in self.commits())
        return found >= num_groups * self.spec.group_size

    @property
    def num_groups(self) -> int | None:
        """Size of the run as the last writer knew it: it may have grown since `run.json` was written."""
        sizes = [record.num_groups for record in self.commits() if record.num_groups is not None]
        return max([*sizes, self.spec.num_groups or 0]) or None


def open_run(root: str | os.PathLike[str]) -> Run:
    """Open the run below a root for reading. Nothing that the run names is imported or executed.

    Raises:
        StoreError: There is no run, it cannot be read, or its format is newer than this version knows.
    """
    return Run(open_files(root))


def stored_members_of_open_groups(files: Files, spec: RunSpec) -> Iterator[pa.Table]:
    """The rows of groups of which some members are in the store and some are not, commit by commit."""
    commits = list(Run(files).commits())
    size = spec.group_size
    open_groups = {r.group for r in _group_records(commits, size) if r.arrived + r.failed < size}
    for commit in commits:
        if any(trajectory // size in open_groups for trajectory in commit.trajectories):
            table = read_commit(files, commit.shard, commit.number)
            assert table is not None
            yield table.filter(pc.is_in(table["group"], value_set=pa.array(sorted(open_groups), pa.int64())))


def _group_records(commits: Iterable[CommitRecord], size: int) -> list[GroupRecord]:
    arrived: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    for commit in commits:
        lost = set(commit.failed)
        for trajectory in commit.trajectories:
            (failed if trajectory in lost else arrived)[trajectory // size] += 1
    return [GroupRecord(group, size, arrived[group], failed[group]) for group in sorted({*arrived, *failed})]


def read_commit(files: Files, shard: int, number: int) -> pa.Table | None:
    """The rows of a commit, checksums verified; None if there is no such commit.

    Raises:
        CorruptFileError: The file is damaged.
    """
    path = layout.commit_path(shard, number)
    try:
        with files.open(path) as file:
            table = pq.ParquetFile(file, page_checksum_verification=True).read()
        return _in_one_piece(table.replace_schema_metadata(None))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{files.root}/{path} cannot be read: {_first_line(error)}") from error


def _in_one_piece(table: pa.Table) -> pa.Table:
    """The same rows in one block of memory: a hundred small ones per commit leave a third more taken than is used."""
    size = pa.MockOutputStream()
    with pa.ipc.new_stream(size, table.schema) as stream:
        stream.write_table(table)
    block = pa.allocate_buffer(size.size())
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(block), table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(block).read_all()


def read_commit_record(files: Files, shard: int, number: int) -> CommitRecord | None:
    """The record in a commit's footer; None if there is no such commit.

    Raises:
        CorruptFileError: The file is damaged.
    """
    path = layout.commit_path(shard, number)
    try:
        with files.open(path) as file:
            metadata = pq.read_metadata(file).metadata or {}
        return CommitRecord.model_validate_json(metadata[COMMIT_KEY])
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptFileError(f"{files.root}/{path} has no readable footer: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _trajectory(rows: list[dict[str, Any]]) -> StoredTrajectory:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    last = rows[-1]
    return StoredTrajectory(
        trajectory=last["trajectory"],
        group=last["group"],
        sample=last["sample"],
        env=last["env"],
        policy=last["policy"],
        reward=sum(rewards) if rewards else None,
        terminated=last["terminated"],
        truncated=last["truncated"],
        messages=_conversation(rows),
        contexts=_contexts(rows),
        failure=json.loads(last["failure"]) if last["failure"] else None,
        rows=rows,
    )


def _conversation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for row in rows:
        if row["context_reset"] and row["step"] > 0:
            messages.append({"role": "system", "content": "[the context starts anew]"})
        messages += json.loads(row["messages"] or "[]")
        if row["response_text"] is not None:
            parsed = row["response_message"]
            messages.append(json.loads(parsed) if parsed else {"role": "assistant", "content": row["response_text"]})
    messages += json.loads(rows[-1]["observation"] or "[]")
    return messages


def _contexts(rows: list[dict[str, Any]]) -> list[TokenContext]:
    contexts: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["prompt_ids"] is None:
            continue
        if row["context_reset"] or not contexts:
            contexts.append([])
        contexts[-1].append(row)
    return [_context(part) for part in contexts]


def _context(rows: list[dict[str, Any]]) -> TokenContext:
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for row in rows:
        response = row["response_ids"] or []
        ids += row["prompt_ids"] + response
        sampled += [False] * len(row["prompt_ids"]) + [True] * len(response)
        given = row["response_logprobs"]
        own = [float("nan")] * len(response) if given is None else [float("nan") if x is None else x for x in given]
        logprobs += [0.0] * len(row["prompt_ids"]) + own
    return TokenContext(np.array(ids, np.int64), np.array(sampled, np.bool_), np.array(logprobs, np.float32))
