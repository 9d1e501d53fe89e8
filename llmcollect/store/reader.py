"""Run: reading what somebody collected, or is collecting, with bounded memory; nothing that it names is imported.

catalog (one listing) -> commit records (footers) -> selection -> commits, the next ones read ahead -> StepBatch
"""

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.batch import StepBatch
from llmcollect.errors import CorruptFileError
from llmcollect.run import RunSpec
from llmcollect.schema import STEP_SCHEMA
from llmcollect.store import catalog, layout
from llmcollect.store.commit import read_commit, read_footers
from llmcollect.store.files import Files, open_files
from llmcollect.store.record import CommitRecord, read_run
from llmcollect.store.selection import Filters, Selection
from llmcollect.store.tail import tail_run
from llmcollect.store.trajectory import StoredTrajectory, trajectories_in
from llmcollect.types import GroupRecord

if TYPE_CHECKING:  # torch takes seconds to import, and reading a run does not need it
    from llmcollect.store.training import StepDataset

# Decoding a row takes three times as long as making tensors of it: every core may decode.
_THREADS = min(4, os.cpu_count() or 1)
# Commits in memory beside the one that was taken last: no thread waits until somebody takes the next.
_AHEAD = _THREADS + 1


class Run:
    """A run that somebody collected, or is collecting. Made by `open_run`.

    What reads rows takes filters: see `llmcollect.store.selection.Filters`. They are decided by footers where these
    suffice, and a trajectory is kept or left out as a whole.

    Attributes:
        record: What `run.json` holds.
        spec: The spec in it.
        corrupt: Files that were skipped, with what is wrong with each, by `on_corrupt="skip"`.
    """

    def __init__(self, files: Files, on_corrupt: Literal["raise", "skip"] = "raise") -> None:
        if on_corrupt not in ("raise", "skip"):
            raise ValueError(f'on_corrupt must be "raise" or "skip"; got {on_corrupt!r}')
        self.files = files
        self.record = read_run(files)
        self.spec: RunSpec = self.record.parsed_spec()
        self.corrupt: dict[str, str] = {}
        self._on_corrupt = on_corrupt

    def __repr__(self) -> str:
        return f"Run({self.files.root!r}, {self.record.run})"

    def steps(self, *, columns: Sequence[str] | None = None, **filters: Unpack[Filters]) -> Iterator[StepBatch]:
        """The rows that are stored by now, one batch a commit, shard by shard and in commit order.

        As many commits as there are cores, up to four, are read at once, and one more is kept ready.

        Args:
            columns: Which columns; None: all. Batches keep, beside them, what their contexts are rebuilt from.
            **filters: Which trajectories.

        Raises:
            CorruptFileError: A file is damaged or missing; the message names it.
            StoreError: The root cannot be read, or a file in it is none of a run.
        """
        for table in self._tables(Selection(filters, columns)):
            yield StepBatch(table)

    def trajectories(self, **filters: Unpack[Filters]) -> Iterator[StoredTrajectory]:
        """Whole trajectories, in the order of `steps`."""
        for table in self._tables(Selection(filters)):
            yield from trajectories_in(table)

    def groups(
        self, *, incomplete: bool = False, **filters: Unpack[Filters]
    ) -> Iterator[tuple[GroupRecord, list[StoredTrajectory]]]:
        """Each group as a whole: what has become of it, and those of its members that the filters keep, by `sample`.

        Groups come in the order in which they got complete; those of whose members none is kept are left out.

        Args:
            incomplete: At the end also groups of which members have not arrived yet.
            **filters: Which members.
        """
        size = self.spec.group_size
        counts = _GroupCounts(size)
        kept: dict[int, list[StoredTrajectory]] = {}
        for record, table in self.read(self.commits(), Selection(filters)):
            for trajectory in trajectories_in(table):
                kept.setdefault(trajectory.group, []).append(trajectory)
            for group in counts.add(record):
                if members := kept.pop(group, None):
                    yield counts.pop(group), sorted(members, key=lambda item: item.sample)
        if incomplete:
            for group, members in kept.items():
                yield counts.pop(group), sorted(members, key=lambda item: item.sample)

    def tail(
        self, *, poll_seconds: float = 0.5, max_poll_seconds: float = 5.0, **filters: Unpack[Filters]
    ) -> Iterator[StepBatch]:
        """The rows that are stored and those that will be, one batch a commit, until every shard has ended.

        It asks each shard for its next commit, and lists nothing. A shard that had none is asked again after
        `poll_seconds`, and then after pauses that grow by half, up to `max_poll_seconds`.

        Raises:
            CorruptFileError, StoreError: As `steps`.
        """
        selection = Selection(filters)
        pauses = poll_seconds, max_poll_seconds
        for _, table in tail_run(self.files, self.record.run, self.spec.num_shards, *pauses, self._skip):
            if len(kept := selection.of(table)):
                yield StepBatch(kept)

    def commits(self) -> Iterator[CommitRecord]:
        """The records of all commits, shard by shard and in order; read from footers alone."""
        places = self._catalog().places()
        for place, footer in zip(places, read_footers(self.files, places, self.record.run), strict=True):
            if isinstance(footer, CommitRecord):
                yield footer
            else:
                self._skip(footer or CorruptFileError(f"{self.files.root}/{layout.commit_path(*place)} is gone"), place)

    def group_records(self) -> list[GroupRecord]:
        """What has become of each group that has arrived in part or whole, in order; read from footers alone."""
        counts = _GroupCounts(self.spec.group_size)
        for record in self.commits():
            counts.add(record)
        return counts.all()

    def to_arrow(self, *, columns: Sequence[str] | None = None, **filters: Unpack[Filters]) -> pa.Table:
        """The rows as one table, in memory."""
        selection = Selection(filters, columns)
        tables = list(self._tables(selection))
        return selection.cut(pa.concat_tables(tables) if tables else STEP_SCHEMA.empty_table())

    def to_pandas(self, *, columns: Sequence[str] | None = None, **filters: Unpack[Filters]) -> Any:
        """The rows as a pandas DataFrame, in memory."""
        return self.to_arrow(columns=columns, **filters).to_pandas()

    def dataset(self) -> Any:
        """The commits that are stored by now as a `pyarrow.dataset.Dataset`; failed trajectories included."""
        import pyarrow.dataset as ds

        filesystem, prefix = self.files.arrow()
        paths = [f"{prefix}/{layout.commit_path(*place)}" for place in self._catalog().places()]
        return ds.dataset(paths, schema=STEP_SCHEMA, format="parquet", filesystem=filesystem)

    def torch_dataset(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_buffer: int = 10_000,
        rank: int | None = None,
        world_size: int | None = None,
        columns: Sequence[str] | None = None,
        **filters: Unpack[Filters],
    ) -> "StepDataset":
        """An IterableDataset of StepTensorDicts: `run.torch_dataset(256, shuffle=True).loader(num_workers=2)`.

        The commits that are stored by now are dealt to ranks and to the loader's workers: each row comes once an
        epoch, whatever their numbers; how many rows a rank gets differs by a few commits.

        Args:
            batch_size: Rows of a batch; the last one of a worker may be smaller.
            shuffle: Deal the commits in random order, and draw rows at random from a buffer.
            seed: What the order follows from, with the number of the epoch (`dataset.set_epoch`).
            shuffle_buffer: Rows in the buffer of a worker.
            rank, world_size: Place among the processes that read it; None: as `torch.distributed` says, else alone.
            columns: Which columns; see `StepBatch.to_tensordict`.
            **filters: Which trajectories.
        """
        from llmcollect.store.training import StepDataset

        return StepDataset(
            self,
            Selection(filters, columns),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            rank=rank,
            world_size=world_size,
        )

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

    def reopened(self) -> "Run":
        """The same run by a connection of its own: one that was there before a fork is of no use after it."""
        return open_run(self.files.root, on_corrupt=self._on_corrupt)

    def read(self, records: Iterable[CommitRecord], selection: Selection) -> Iterator[tuple[CommitRecord, pa.Table]]:
        """The selected rows of each commit, read in worker threads a little ahead of whoever takes them."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="llmcollect reader") as threads:
            ahead: deque[tuple[CommitRecord, Future[pa.Table]]] = deque()
            try:
                for record in records:
                    ahead.append((record, threads.submit(self._read, record, selection)))
                    if len(ahead) > _AHEAD:
                        first, rows = ahead.popleft()
                        yield first, rows.result()
                while ahead:
                    first, rows = ahead.popleft()
                    yield first, rows.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _tables(self, selection: Selection) -> Iterator[pa.Table]:
        return (table for _, table in self.read(self.commits(), selection) if table.num_rows)

    def _read(self, record: CommitRecord, selection: Selection) -> pa.Table:
        if selection.may_hold(record):
            try:
                return read_commit(self.files, record, selection)
            except CorruptFileError as error:
                self._skip(error, (record.shard, record.number))
        return STEP_SCHEMA.empty_table()

    def _catalog(self) -> catalog.Catalog:
        found = catalog.list_run(self.files, self.spec.num_shards)
        if self._on_corrupt == "skip":
            self.corrupt |= dict.fromkeys(found.gaps, "it is missing")
            found.gaps.clear()
        found.check(self.files.root)
        return found

    def _skip(self, error: CorruptFileError, place: tuple[int, int]) -> None:
        if self._on_corrupt == "raise":
            raise error
        self.corrupt[layout.commit_path(*place)] = str(error)


def open_run(root: str | os.PathLike[str], *, on_corrupt: Literal["raise", "skip"] = "raise") -> Run:
    """Open the run below a root for reading. Nothing that the run names is imported or executed.

    Args:
        root: A local folder, or `s3://bucket/path`.
        on_corrupt: "raise": a damaged file stops the reading; "skip": it is left out, and listed in `Run.corrupt`.

    Raises:
        StoreError: There is no run, it cannot be read, or its format is newer than this version knows.
    """
    return Run(open_files(root), on_corrupt)


def stored_members_of_open_groups(run: Run, commits: Sequence[CommitRecord]) -> Iterator[pa.Table]:
    """The rows of groups of which some members are in these commits and some are not, commit by commit."""
    size = run.spec.group_size
    counts = _GroupCounts(size)
    for commit in commits:
        for group in counts.add(commit):
            counts.pop(group)
    open_groups = {record.group for record in counts.all()}
    wanted = [commit for commit in commits if any(number // size in open_groups for number in commit.trajectories)]
    for _, table in run.read(wanted, Selection({"include_failed": True})):
        yield table.filter(pc.is_in(table["group"], value_set=pa.array(sorted(open_groups), pa.int64())))


class _GroupCounts:
    """How many members of each group have arrived, and how many were lost to failures."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: Counter[int] = Counter()
        self._failed: Counter[int] = Counter()

    def add(self, record: CommitRecord) -> list[int]:
        """Count a commit's trajectories; the groups that have got complete by it."""
        lost, complete = set(record.failed), []
        for trajectory in record.trajectories:
            group = trajectory // self._size
            (self._failed if trajectory in lost else self._arrived)[group] += 1
            if self._arrived[group] + self._failed[group] == self._size:
                complete.append(group)
        return complete

    def pop(self, group: int) -> GroupRecord:
        """What has become of a group, and forget it."""
        return GroupRecord(group, self._size, self._arrived.pop(group, 0), self._failed.pop(group, 0))

    def all(self) -> list[GroupRecord]:
        """What has become of each group, in order."""
        groups = sorted({*self._arrived, *self._failed})
        return [GroupRecord(group, self._size, self._arrived[group], self._failed[group]) for group in groups]
