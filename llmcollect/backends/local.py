"""The local backend: shards on the engine thread, their rows handed over in memory.

collect_shard (engine thread) -> emit -> [tables] -> get (consumer's thread) -> release room
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import pyarrow as pa

from llmcollect.errors import single_error
from llmcollect.policies.engines import Job, engine_thread
from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec
from llmcollect.shard import Root, collect_shard, make_admission


class LocalBackend:
    """One collection that runs in the background. Its methods may be called from any thread but the engines' own.

    Attributes:
        progress: One a shard.
    """

    def __init__(self, spec: RunSpec, root: Root | None) -> None:
        self._spec, self._root = spec, root
        self.progress = [ShardProgress(shard) for shard in range(spec.num_shards)]
        self._thread = engine_thread()
        self._admission = make_admission(spec)
        self._tables: deque[tuple[pa.Table, Sequence[int]]] = deque()
        self._arrived = asyncio.Event()
        self._stopped = False
        self._job: Job[None] = self._thread.submit(self._run())
        self._job.outcome.add_done_callback(lambda _: self._thread.loop.call_soon_threadsafe(self._arrived.set))

    def get(self) -> tuple[pa.Table, Sequence[int]] | None:
        """The rows of the next commit with the numbers of its trajectories, None at the end; blocks.

        Raises:
            LLMCollectError: What ended the collection.
        """
        while not self._tables:
            if not self._thread.submit(self._more()).result():
                return None
        return self._tables.popleft()  # here, not on the loop: an interrupted call takes nothing with it

    def release(self, trajectories: int) -> None:
        """So many trajectories no longer take up room. Does not wait."""
        self._thread.submit(self._admission.release(trajectories))

    def finish(self) -> None:
        """Let nothing new begin; what is in flight is finished. Does not wait."""
        self._thread.submit(self._admission.close())

    def stop(self) -> None:
        """Give up what is in flight; what has finished is committed. Blocks until engines and envs are free."""
        self._stopped = True
        self._job.cancel()
        self._job.wait()

    async def _run(self) -> None:
        with single_error():
            async with asyncio.TaskGroup() as shards:
                for progress in self.progress:
                    shards.create_task(
                        collect_shard(
                            self._spec,
                            progress.shard,
                            root=self._root,
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
