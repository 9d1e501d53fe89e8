"""Deadline: the time-outs of one trajectory, over one timer."""

import asyncio
import math
from types import TracebackType
from typing import Self


class Deadline:
    """Cancels the block when a phase of it, or all of it, takes too long, and raises what the phase asks for.

        async with Deadline(total_s) as deadline:
            deadline.phase(60, EnvError, "reset")
            ...
            deadline.phase(600, PolicyError, "generate")

    A new phase moves the moment but not the timer: a timer that goes off early sets itself anew. So a phase costs a
    look at the clock, where `asyncio.timeout` costs a timer.

    Args:
        total_s: Longest time for the whole block; None: no limit.
    """

    def __init__(self, total_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + (math.inf if total_s is None else total_s)
        self._total_s = total_s
        self._when = self._end
        self._seconds, self._what = 0.0, ""
        self._kind: type[Exception] = TimeoutError
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def phase(self, seconds: float, kind: type[Exception], what: str) -> None:
        """From now on the block does this, and is to take no longer."""
        self._kind, self._what, self._seconds = kind, what, seconds
        self._when = min(self._loop.time() + seconds, self._end)
        if self._timer is None or self._timer.when() > self._when:
            self._arm()

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        if self._when < math.inf:
            self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise self._error() from error

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._when, self._look)

    def _look(self) -> None:
        if self._loop.time() < self._when:
            self._arm()
        else:
            self._expired = True
            self._task.cancel()

    def _error(self) -> Exception:
        if self._when == self._end:
            return TimeoutError(f"the trajectory took longer than {self._total_s} s")
        return self._kind(f"{self._what} took longer than {self._seconds:g} s")
