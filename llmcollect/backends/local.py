"""The local backend: shards on the engine thread, their rows handed over in memory.

collect_shard (engine thread) -> emit -> [tables] -> get (consumer's thread) -> release room
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from llmcollect.backends.base import BackendOptions, Delivery
from llmcollect.errors import single_error
from llmcollect.policies.engines import Job, engine_thread
from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec
from llmcollect.shard import Root, collect_shard, make_admission
from llmcollect.store.record import CommitRecord


class LocalOptions(BackendOptions):
    """`backend="local"` has no options."""

    def begin(self, spec: RunSpec, root: Root | None, rows: int, stored: Sequence[CommitRecord]) -> "LocalBackend":
        return LocalBackend(spec if root else cut_for_memory(spec, rows), root)


class LocalBackend:
    """One collection that runs in the background. Its methods may be called from any thread but the engines' own.

    Args:
        spec: The run.
        root: Its home, or None.
        shards: Which shards; None: all.
        skip: Trajectories, by shard, that somebody has already; with a root, the store knows.
    """

    def __init__(
        self,
        spec: RunSpec,
        root: Root | None,
        shards: Sequence[int] | None = None,
        skip: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self._spec, self._root, self._skip = spec, root, skip or {}
        self._progress = [ShardProgress(shard) for shard in (range(spec.num_shards) if shards is None else shards)]
        self._thread = engine_thread()
        self._admission = make_admission(spec)
        self._tables: deque[Delivery] = deque()
        self._arrived = asyncio.Event()
        self._stopped = False
        self._job: Job[None] = self._thread.submit(self._run())
        self._job.outcome.add_done_callback(lambda _: self._thread.loop.call_soon_threadsafe(self._arrived.set))

    @property
    def progress(self) -> list[ShardProgress]:
        return self._progress

    def get(self) -> Delivery | None:
        while not self._tables:
            if not self._thread.submit(self._more()).result():
                return None
        return self._tables.popleft()  # here, not on the loop: an interrupted call takes nothing with it

    def release(self, trajectories: int) -> None:
        self._thread.submit(self._admission.release(trajectories))

    def finish(self) -> None:
        self._thread.submit(self._admission.close())

    def stop(self) -> None:
        self._stopped = True
        self._job.cancel()
        self._job.wait()

    def update_weights(self, folder: Path, version: int | None, policy: str) -> int:
        index = self._spec.policy_names.index(policy)
        return self._thread.submit(
            self._thread.update_weights(self._spec.policies[index], self._spec.limits, folder, version)
        ).result()

    async def _run(self) -> None:
        with single_error():
            async with asyncio.TaskGroup() as shards:
                for progress in self._progress:
                    shards.create_task(
                        collect_shard(
                            self._spec,
                            progress.shard,
                            root=self._root,
                            skip=self._skip.get(progress.shard, ()),
                            admission=self._admission,
                            progress=progress,
                            emit=self._emit,
                        )
                    )

    async def _emit(self, table: pa.Table, trajectories: Sequence[int]) -> None:
        self._tables.append((table, trajectories))
        self._arrived.set()

    async def _more(self) -> bool:
        """Wait for rows or for the end, and say which."""
        while not self._tables:
            if self._job.outcome.done():
                if not self._stopped:
                    self._job.outcome.result()
                return False
            self._arrived.clear()
            await self._arrived.wait()
        return True


def cut_for_memory(spec: RunSpec, rows: int) -> RunSpec:
    """Without files there is no reason to gather many rows before they are handed over."""
    limits = spec.limits
    sooner = {"commit_rows": min(limits.commit_rows, rows), "commit_seconds": min(limits.commit_seconds, 0.1)}
    return spec.model_copy(update={"limits": limits.model_copy(update=sooner)})
