"""Admission: the one place where output is bounded."""

import asyncio
from collections.abc import Callable


class Admission:
    """Lets groups in while fewer than `capacity` trajectories are open.

    A trajectory is open from its admission until its rows are taken: by the consumer, or, where nobody consumes, by
    the store. Admission is by whole group and reserves room for all of it, so what was let in always runs on, and
    nothing is ever dropped: a slow consumer or a slow disk stops new groups, and that is all.

    With capacity 4 and groups of 2: groups 0 and 1 get in, group 2 waits. Group 0 finishes; group 2 still waits, for
    the rows of group 0 lie in memory. The consumer takes them; two places are free, and group 2 gets in.

    Args:
        capacity: Most open trajectories; at least the size of a group.
        busy: As many running trajectories keep the engines busy.

    Attributes:
        open: Admitted, and not yet taken.
        running: Admitted, and not yet finished.
    """

    def __init__(self, capacity: int, busy: int = 1) -> None:
        self.capacity = capacity
        self.open = self.running = 0
        self._busy = busy
        self._waiting: list[int] = []
        self._on_starving: list[Callable[[], None]] = []
        self._freed = asyncio.Condition()
        self._closed = False

    @property
    def starving(self) -> bool:
        """Whether engines idle for lack of room: what is finished must not wait to fill a commit then."""
        return bool(self._waiting) and self.running < self._busy and self.open + min(self._waiting) > self.capacity

    def when_starving(self, call: Callable[[], None]) -> None:
        """Call this when `starving` has become true."""
        self._on_starving.append(call)

    async def admit(self, count: int) -> bool:
        """Wait until `count` trajectories have room, and reserve it; False if it was closed."""
        assert 0 < count <= self.capacity, f"a group of {count} never fits into {self.capacity}"
        async with self._freed:
            self._waiting.append(count)
            try:
                while self.open + count > self.capacity and not self._closed:
                    self._tell_if_starving()
                    await self._freed.wait()
            finally:
                self._waiting.remove(count)
            if self._closed:
                return False
            self.open += count
            self.running += count
            return True

    async def close(self) -> None:
        """Let nobody in any more; what was admitted runs on."""
        async with self._freed:
            self._closed = True
            self._freed.notify_all()

    def finish(self) -> None:
        """A trajectory has finished; its rows are still to be taken."""
        self.running -= 1
        self._tell_if_starving()

    async def release(self, count: int) -> None:
        """The rows of `count` trajectories were taken."""
        async with self._freed:
            self.open -= count
            self._freed.notify_all()

    def _tell_if_starving(self) -> None:
        if self.starving:
            for call in self._on_starving:
                call()
