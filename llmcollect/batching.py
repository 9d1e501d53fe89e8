"""How the stream of finished trajectories is cut into the batches that a consumer gets.

    add(rows of a commit) -> held -> take() -> StepBatch, or None until there is enough

| `yields` | a batch is |
| --- | --- |
| "steps" | exactly `size` rows; the last one of a run may be shorter |
| "last_steps" | the same, of the last step of each trajectory: its context is the whole conversation |
| "trajectories" | whole trajectories with at least `size` rows together |
| "groups" | whole groups with at least `size` rows together |

Rows of failed trajectories are left out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.batch import StepBatch
from llmcollect.types import GroupRecord

if TYPE_CHECKING:
    from llmcollect.tensors import StepTensorDict

Yields = Literal["steps", "trajectories", "last_steps", "groups"]
_Ints = npt.NDArray[np.int64]


class Batching(Protocol):
    """One way of cutting.

    Attributes:
        divisible: Whether the first rows of a batch are a batch as well.
    """

    divisible: bool

    def add(self, table: pa.Table, trajectories: Sequence[int]) -> int:
        """Take the rows of trajectories that have finished.

        Args:
            table: Whole trajectories, failed ones included.
            trajectories: Their numbers, and those of trajectories that finished without rows here.

        Returns:
            How many open trajectories no longer take up room.
        """
        ...

    def add_stored(self, table: pa.Table) -> None:
        """Take rows of whole trajectories that an earlier run has stored; they take up no room."""
        ...

    def take(self, at_end: bool) -> StepBatch | None:
        """The next batch; at the end also one that is too small; None if there is none."""
        ...

    def to_tensordict(self, batch: StepBatch) -> "StepTensorDict":
        """The batch that was taken last, as the consumer gets it."""
        ...


def make_batching(yields: Yields, size: int, group_size: int, keep_incomplete: bool) -> Batching:
    """The one that `yields` names."""
    if yields == "groups":
        return GroupBatching(size, group_size, keep_incomplete)
    return RowBatching(yields, size)


class RowBatching:
    """Steps, last steps or trajectories."""

    def __init__(self, yields: Yields, size: int) -> None:
        self._yields, self._size = yields, size
        self.divisible = yields != "trajectories"
        self._held: list[StepBatch] = []
        self._count = 0

    def add(self, table: pa.Table, trajectories: Sequence[int]) -> int:
        batch = StepBatch(table).without_failed()
        if self._yields == "last_steps":
            batch = batch[_last_rows(batch)]
        if len(batch):
            self._held.append(batch)
            self._count += len(batch)
        return len(trajectories)

    def add_stored(self, table: pa.Table) -> None:
        self.add(table, ())

    def take(self, at_end: bool) -> StepBatch | None:
        if not self._count or (self._count < self._size and not at_end):
            return None
        rows = StepBatch.concat(self._held)
        cut = min(self._size, len(rows))
        if self._yields == "trajectories":
            ends = _last_rows(rows) + 1
            cut = int(ends[np.searchsorted(ends, cut)])
        self._held = [rows[cut:]] if cut < len(rows) else []
        self._count = len(rows) - cut
        return rows[:cut]

    def to_tensordict(self, batch: StepBatch) -> "StepTensorDict":
        return batch.to_tensordict()


@dataclass(slots=True)
class _OpenGroup:
    """A group of which members are missing."""

    parts: list[StepBatch] = field(default_factory=list)
    members: set[int] = field(default_factory=set)
    arrived: int = 0
    failed: int = 0
    room: int = 0


class GroupBatching:
    """Groups: a group is held until each member has come to an outcome or failed.

    Attributes:
        dropped: Incomplete groups that were left out.
    """

    divisible = False

    def __init__(self, size: int, group_size: int, keep_incomplete: bool) -> None:
        self._size, self._group_size, self._keep_incomplete = size, group_size, keep_incomplete
        self._open: dict[int, _OpenGroup] = {}
        self._ready: deque[tuple[StepBatch, GroupRecord]] = deque()
        self._taken: list[GroupRecord] = []
        self.dropped = 0

    def add(self, table: pa.Table, trajectories: Sequence[int]) -> int:
        return self._add(table, trajectories, room=1)

    def add_stored(self, table: pa.Table) -> None:
        self._add(table, pc.unique(table["trajectory"]).to_pylist(), room=0)

    def take(self, at_end: bool) -> StepBatch | None:
        if at_end:
            for number in list(self._open):
                self._close(number)
        rows, count = 0, 0
        for batch, _ in self._ready:
            if rows >= self._size:
                break
            rows, count = rows + len(batch), count + 1
        if not rows or (rows < self._size and not at_end):
            return None
        taken = [self._ready.popleft() for _ in range(count)]
        self._taken = [record for _, record in taken]
        return StepBatch.concat([batch for batch, _ in taken])

    def to_tensordict(self, batch: StepBatch) -> "StepTensorDict":
        import torch
        from tensordict import TensorDict

        tensors = batch.to_tensordict()
        counts = {record.group: record for record in self._taken}
        records = [counts[number] for number in batch.to_arrow()["group"].to_pylist()]
        names = ("expected", "arrived", "failed")
        flags = {name: torch.tensor([getattr(record, name) for record in records]) for name in names}
        tensors["group"] = TensorDict(flags, batch_size=tensors.batch_size)
        return tensors

    def _add(self, table: pa.Table, trajectories: Sequence[int], room: int) -> int:
        released = 0
        numbers, failed = table["trajectory"].to_numpy(), pc.is_valid(table["failure"]).to_numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        ends = np.append(starts[1:], len(numbers))[: len(starts)]
        spans = {int(numbers[start]): (int(start), int(end)) for start, end in zip(starts, ends, strict=True)}
        for trajectory in trajectories:
            number = trajectory // self._group_size
            group = self._open.setdefault(number, _OpenGroup())
            group.room += room
            group.members.add(trajectory)
            if trajectory in spans:
                start, end = spans[trajectory]
                if failed[end - 1]:
                    group.failed += 1
                else:
                    group.arrived += 1
                    group.parts.append(StepBatch(table.slice(start, end - start)))
            if len(group.members) == self._group_size:
                released += group.room
                self._close(number)
        return released

    def _close(self, number: int) -> None:
        group = self._open.pop(number)
        record = GroupRecord(number, self._group_size, group.arrived, group.failed)
        if not record.complete and not self._keep_incomplete:
            self.dropped += 1
        elif group.arrived:
            self._ready.append((StepBatch.concat(group.parts), record))


def _last_rows(batch: StepBatch) -> _Ints:
    """Places of the last rows of the batch's trajectories."""
    return np.flatnonzero(np.diff(batch.to_arrow()["trajectory"].to_numpy(), append=-1))
