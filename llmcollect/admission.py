"""Admission: the one place where output is bounded."""

import asyncio
import enum
from collections.abc import Callable


class AdmissionState(enum.Enum):
    """Whether the last who asked got in."""

    OPEN = "open"
    BLOCKED = "blocked"


class Admission:
    """Lets groups in while fewer than `capacity` trajectories are open.

    A trajectory is open from its admission until its rows are taken: by the consumer, or, where nobody consumes, by
    the store. Admission is by whole group and reserves room for all of it, so what was let in always runs on, and
    nothing is ever dropped: a slow consumer or a slow disk stops new groups, and that is all.

    With capacity 4 and groups of 2: groups 0 and 1 get in, group 2 waits. Group 0 finishes; group 2 still waits, for
    the rows of group 0 lie in memory. The consumer takes them; two places are free, and group 2 gets in.

    Args:
        capacity: Most open trajectories; at least the size of a group.
        on_blocked: Called when somebody begins to wait: what is finished should be handed on now.
    """

    def __init__(self, capacity: int, on_blocked: Callable[[], None] = lambda: None) -> None:
        self.capacity = capacity
        self.open = 0
        self.state = AdmissionState.OPEN
        self._on_blocked = [on_blocked]
        self._freed = asyncio.Condition()

    def when_blocked(self, call: Callable[[], None]) -> None:
        """Also call this when somebody begins to wait."""
        self._on_blocked.append(call)

    async def admit(self, count: int) -> None:
        """Wait until `count` trajectories have room, and reserve it."""
        assert 0 < count <= self.capacity, f"a group of {count} never fits into {self.capacity}"
        async with self._freed:
            while self.open + count > self.capacity:
                if self.state is AdmissionState.OPEN:
                    self.state = AdmissionState.BLOCKED
                    for call in self._on_blocked:
                        call()
                await self._freed.wait()
            self.state = AdmissionState.OPEN
            self.open += count

    async def release(self, count: int) -> None:
        """The rows of `count` trajectories were taken."""
        async with self._freed:
            self.open -= count
            self._freed.notify_all()
