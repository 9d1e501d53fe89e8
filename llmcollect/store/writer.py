"""ShardWriter: appends whole trajectories to a shard, together with any number of other writers.

The data file is the commit. Put number n; if n is taken by this very commit, the answer to an earlier put was lost and
all is well; if it is another's, drop the trajectories that are stored by now from what is pending and try the next
number. So the first commit of a trajectory wins, and every trajectory is in the store once.
"""

import math
import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.batch import trajectories_to_table
from llmcollect.run import RunSpec
from llmcollect.store import catalog, layout
from llmcollect.store.commit import encode_commit, read_commit_records
from llmcollect.store.files import Files
from llmcollect.store.record import CommitRecord, EndRecord, RunRecord, now
from llmcollect.types import Trajectory

_MOST_PROBES = 256


class ShardWriter:
    """One writer of one shard. Not thread-safe; `append` blocks on the store, so call it beside an event loop.

    Attributes:
        writer: Token that names this writer in rows and commits.
        done: Numbers of the trajectories that the shard holds, as far as this writer has looked.
        failed: Those of them that ended in a failure.
    """

    def __init__(self, files: Files, record: RunRecord, spec: RunSpec, shard: int) -> None:
        self.writer = uuid.uuid4().hex[:16]
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self._files, self._record, self._spec, self._shard = files, record, spec, shard
        self._next = 0
        self._rows = self._tokens = 0

    def catch_up(self) -> None:
        """Learn what the shard holds: one listing, and the footers that are new to this writer.

        Raises:
            StoreError: The shard cannot be read, or holds a file that is no commit.
            CorruptFileError: A commit is damaged or missing.
        """
        found = catalog.list_shard(self._files, self._shard)
        found.check(self._files.root)
        self._take_all([place for place in found.places() if place[1] >= self._next])

    def append(self, trajectories: Sequence[Trajectory]) -> pa.Table | None:
        """Commit trajectories that no other writer has committed; the rows that were, or None if there were none.

        Raises:
            StoreError: The store refused; nothing of this call is in it, unless an answer was lost: another append of
                the same trajectories finds out.
        """
        pending = [item for item in trajectories if item.trajectory not in self.done]
        table = trajectories_to_table(pending, run=self._record.run, shard=self._shard, writer=self.writer)
        attempts = [{"trajectory": item.trajectory, **attempt} for item in pending for attempt in item.failed_attempts]
        return self.append_table(table, attempts)

    def append_table(self, table: pa.Table, failed_attempts: Sequence[dict[str, Any]] = ()) -> pa.Table | None:
        """`append`, of rows: those of a trajectory consecutive and in order."""
        while (table := self._not_done(table)).num_rows:
            attempts = [item for item in failed_attempts if item["trajectory"] not in self.done]
            record = self._commit_record(table, attempts)
            path = layout.commit_path(self._shard, self._next)
            if self._files.put_if_absent(path, encode_commit(table, record)):
                self._take(record)
                return table
            (winner,) = read_commit_records(self._files, [(self._shard, self._next)], self._record.run)
            assert winner is not None, f"{path} is taken and cannot be found"
            if winner == record:
                self._take(record)
                return table
            self._take(winner)
            self._probe()
        return None

    def end(self) -> None:
        """Say that the shard is complete."""
        self._probe()
        record = EndRecord(
            run=self._record.run,
            shard=self._shard,
            commits=self._next,
            trajectories=len(self.done),
            failed=len(self.failed),
            rows=self._rows,
            tokens=self._tokens,
            num_groups=self._spec.num_groups,
            ended_at=now(),
        )
        path = layout.end_path(self._shard, self._next)
        if self._files.read(path) is None:
            self._files.put_if_absent(path, record.model_dump_json(indent=2).encode())

    def _probe(self) -> None:
        """Read the footers of the next numbers until one is free: twice as many at a time, for a zombie has many."""
        count = 1
        while True:
            before = self._next
            self._take_all([(self._shard, self._next + place) for place in range(count)])
            if self._next < before + count:
                return
            count = min(2 * count, _MOST_PROBES)

    def _take_all(self, places: Sequence[tuple[int, int]]) -> None:
        """Take the commits at these places, up to the first that is not there."""
        for record in read_commit_records(self._files, places, self._record.run):
            if record is None:
                return
            self._take(record)

    def _take(self, record: CommitRecord) -> None:
        self.done.update(record.trajectories)
        self.failed.update(record.failed)
        self._rows += record.rows
        self._tokens += record.tokens
        self._next = record.number + 1

    def _not_done(self, table: pa.Table) -> pa.Table:
        stored = self.done.intersection(pc.unique(table["trajectory"]).to_pylist())
        if not stored:
            return table
        return table.filter(pc.invert(pc.is_in(table["trajectory"], value_set=pa.array(stored, pa.int64()))))

    def _commit_record(self, table: pa.Table, failed_attempts: Sequence[dict[str, Any]]) -> CommitRecord:
        versions = pc.list_flatten(table["policy_versions"]).combine_chunks().field("version")
        return CommitRecord(
            run=self._record.run,
            shard=self._shard,
            number=self._next,
            writer=self.writer,
            committed_at=now(),
            trajectories=pc.unique(table["trajectory"]).to_pylist(),
            failed=pc.unique(table.filter(pc.is_valid(table["failure"]))["trajectory"]).to_pylist(),
            failed_attempts=tuple(failed_attempts),
            rows=table.num_rows,
            tokens=pc.sum(pc.list_value_length(table["response_ids"])).as_py() or 0,
            policy_versions=sorted(pc.unique(versions).to_pylist()),
            envs=pc.unique(table["env"]).to_pylist(),
            best_reward=_best_reward(table),
            num_groups=self._spec.num_groups,
            limits=self._spec.limits.model_dump(),
        )


def _best_reward(table: pa.Table) -> float | None:
    rewards = table.group_by("trajectory").aggregate([("reward", "sum")])["reward_sum"]
    best = pc.max(rewards).as_py()
    return best if best is not None and math.isfinite(best) else None
