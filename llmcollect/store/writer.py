"""ShardWriter: appends whole trajectories to a shard, together with any number of other writers.

The data file is the commit. Put number n; if n is taken by oneself, the answer to an earlier put was lost and all is
well; if it is another's, drop the trajectories that it holds from what is pending and try n + 1. So the first commit
of a trajectory wins, and every trajectory is in the store once.
"""

import uuid
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmcollect.batch import trajectories_to_table
from llmcollect.run import RunSpec
from llmcollect.store import layout
from llmcollect.store.files import Files
from llmcollect.store.reader import read_commit_record
from llmcollect.store.record import COMMIT_KEY, CommitRecord, EndRecord, RunRecord, now
from llmcollect.types import Trajectory

# Columns with few distinct values, or that repeat from row to row. Token ids gain as well: a vocabulary is small.
_DICTIONARY = ["run", "writer", "env", "policy", "finish_reason", "stop_reason", "prompt_ids.list.element"]


class ShardWriter:
    """One writer of one shard. Not thread-safe; `append` blocks on the disk, so call it beside an event loop.

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
        """Read the records of all commits that are new since the last look."""
        while (record := read_commit_record(self._files, self._shard, self._next)) is not None:
            self._take(record)

    def append(self, trajectories: Sequence[Trajectory]) -> pa.Table | None:
        """Commit trajectories that no other writer has committed; the rows that were, or None if there were none.

        Raises:
            StoreError: The file system refused; nothing of this call is in the store.
        """
        pending = [item for item in trajectories if item.trajectory not in self.done]
        while pending:
            table = trajectories_to_table(pending, run=self._record.run, shard=self._shard, writer=self.writer)
            record = self._commit_record(pending, table)
            path = layout.commit_path(self._shard, self._next)
            if self._files.put_if_absent(path, _encode(table, record)):
                self._take(record)
                return table
            winner = read_commit_record(self._files, self._shard, self._next)
            assert winner is not None, f"{path} is taken and cannot be found"
            self._take(winner)
            if winner.writer == self.writer:
                return table
            pending = [item for item in pending if item.trajectory not in self.done]
        return None

    def end(self) -> None:
        """Say that the shard is complete."""
        self.catch_up()
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
        if not self._files.exists(path):
            self._files.put_if_absent(path, record.model_dump_json(indent=2).encode())

    def _take(self, record: CommitRecord) -> None:
        self.done.update(record.trajectories)
        self.failed.update(record.failed)
        self._rows += record.rows
        self._tokens += record.tokens
        self._next = record.number + 1

    def _commit_record(self, trajectories: Sequence[Trajectory], table: pa.Table) -> CommitRecord:
        versions = pc.list_flatten(table["policy_versions"]).combine_chunks().field("version")
        return CommitRecord(
            run=self._record.run,
            shard=self._shard,
            number=self._next,
            writer=self.writer,
            committed_at=now(),
            trajectories=tuple(item.trajectory for item in trajectories),
            failed=tuple(item.trajectory for item in trajectories if item.failed),
            failed_attempts=tuple(
                {"trajectory": item.trajectory, **attempt} for item in trajectories for attempt in item.failed_attempts
            ),
            rows=table.num_rows,
            tokens=sum(item.num_tokens for item in trajectories),
            policy_versions=tuple(sorted(pc.unique(versions).to_pylist())),
            num_groups=self._spec.num_groups,
            limits=self._spec.limits.model_dump(),
        )


def _encode(table: pa.Table, record: CommitRecord) -> bytes:
    sink = pa.BufferOutputStream()
    footer = {COMMIT_KEY: record.model_dump_json().encode()}
    pq.write_table(
        table.replace_schema_metadata(footer),
        sink,
        compression="zstd",
        use_dictionary=_DICTIONARY,
        row_group_size=8192,
        write_page_checksum=True,
        write_page_index=True,
    )
    return bytes(sink.getvalue())
