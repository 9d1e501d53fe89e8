"""Committer: cuts the stream of finished trajectories into commits, beside the rollout and never in its loop.

    add(trajectory) -> pending -> [due] -> append, in a worker thread -> taken(table)

It waits for trajectories or for their commit to fall due: by rows, bytes or age, or because it is urgent. Exactly
one `run()` is its life; it ends after `close()` with nothing left pending.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa

from llmcollect.run import Limits
from llmcollect.types import Trajectory

_BYTES_PER_TOKEN = 8  # id and log-prob


class Committer:
    """See the module.

    Args:
        append: Writes trajectories; blocking; the rows that are in the store by this call, or None.
        taken: Awaited with the trajectories of a commit and its rows, in commit order.
        urgent: Whether what is pending should be committed at once. Asked when something was added, and on `wake()`.
        limits: `commit_rows`, `commit_bytes`, `commit_seconds`.
    """

    def __init__(
        self,
        append: Callable[[Sequence[Trajectory]], pa.Table | None],
        taken: Callable[[Sequence[Trajectory], pa.Table | None], Awaitable[None]],
        urgent: Callable[[], bool],
        limits: Limits,
    ) -> None:
        self._append, self._taken, self._urgent, self._limits = append, taken, urgent, limits
        self._pending: list[Trajectory] = []
        self._rows = self._bytes = 0
        self._oldest = 0.0
        self._closed = False
        self._wake = asyncio.Event()

    def add(self, trajectory: Trajectory) -> None:
        """A trajectory has finished."""
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending.append(trajectory)
        self._rows += len(trajectory.steps)
        self._bytes += sum(_size(step.prompt_ids, step.response_ids) for step in trajectory.steps)
        self._wake.set()

    def wake(self) -> None:
        """Look again whether a commit is urgent."""
        self._wake.set()

    def close(self) -> None:
        """Nothing will be added any more."""
        self._closed = True
        self._wake.set()

    async def run(self) -> None:
        """Commit until closed and empty.

        Raises:
            StoreError: A commit failed.
        """
        while True:
            await self._wait()
            if not self._pending:
                return
            batch, self._pending = self._pending, []
            self._rows = self._bytes = 0
            table = await asyncio.to_thread(self._append, batch)
            await self._taken(batch, table)

    async def _wait(self) -> None:
        """Until a commit is due, or all is done."""
        while not self._closed and not (self._pending and self._due()):
            self._wake.clear()
            left = self._limits.commit_seconds - (time.monotonic() - self._oldest) if self._pending else None
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _due(self) -> bool:
        return (
            self._urgent()
            or self._rows >= self._limits.commit_rows
            or self._bytes >= self._limits.commit_bytes
            or time.monotonic() - self._oldest >= self._limits.commit_seconds
        )


def _size(prompt: Sequence[int] | None, response: Sequence[int] | None) -> int:
    return _BYTES_PER_TOKEN * (len(prompt or ()) + len(response or ()))
