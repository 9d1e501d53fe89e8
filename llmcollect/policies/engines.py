"""EngineThread: the one thread of a process that owns the event loop, all engines and every rollout.

An engine belongs to one loop for its whole life (awaiting vLLM's from a second loop hangs, and it dies with the first).
So the loop outlives whoever asks: a facade, a flow, two collectors. Engines are counted by their spec: shards and
collectors that name the same policy share one, and the last to leave closes it.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from llmcollect.components import ComponentSpec
from llmcollect.errors import LLMCollectError, PolicyError
from llmcollect.policies.base import Policy

T = TypeVar("T")


@dataclass(slots=True)
class Engine:
    """A started policy and the slots of its trajectories.

    Attributes:
        slots: One a trajectory in flight; as many as the first who asked for the engine has `concurrency`.
    """

    policy: Policy
    slots: asyncio.Semaphore
    users: int = 0
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Job(Generic[T]):
    """A coroutine on another thread's loop.

    Attributes:
        outcome: Done when the coroutine has ended, however: a cancelled one too is not done before it has cleaned up
            (unlike what `asyncio.run_coroutine_threadsafe` returns).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop, self._coroutine = loop, coroutine
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Cancel the coroutine; from any thread; does not wait."""
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def result(self, timeout: float | None = None) -> T:
        """Wait for the coroutine's result."""
        return self.outcome.result(timeout)

    def wait(self) -> None:
        """Wait for the coroutine's end, whatever it is."""
        concurrent.futures.wait([self.outcome])

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._settle)

    def _settle(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class EngineThread:
    """A daemon thread with an event loop. Get the process's own one from `engine_thread()`."""

    def __init__(self) -> None:
        _refuse_without_main_guard()
        self.loop = asyncio.new_event_loop()
        self._engines: dict[str, Engine] = {}
        self._thread = threading.Thread(target=self.loop.run_forever, name="llmcollect engines", daemon=True)
        self._thread.start()
        atexit.register(self._close_all)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Job[T]":
        """Start a coroutine on the loop; from any thread."""
        return Job(self.loop, coroutine)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the loop from another one. A cancellation returns when the coroutine has cleaned up."""
        job = self.submit(coroutine)
        outcome = asyncio.wrap_future(job.outcome)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            job.cancel()
            await asyncio.wait([outcome])
            raise

    @contextlib.asynccontextmanager
    async def lease(self, spec: ComponentSpec, concurrency: int) -> AsyncIterator[Engine]:
        """The engine of a policy, started if nobody uses it yet. Only on the loop.

        Raises:
            PolicyError: It cannot be started.
        """
        key = json.dumps([spec.target, spec.kwargs, id(spec._constructor)], sort_keys=True, default=repr)
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = Engine(spec.build(), asyncio.Semaphore(concurrency))
            self.loop.create_task(self._start(key, engine, spec.label))
        engine.users += 1
        try:
            await asyncio.shield(engine.ready)
            yield engine
        finally:
            engine.users -= 1
            if not engine.users and self._engines.get(key) is engine:
                del self._engines[key]
                await _close(engine)

    async def _start(self, key: str, engine: Engine, label: str) -> None:
        try:
            await engine.policy.start()
        except BaseException as error:  # noqa: BLE001 - belongs to those who wait
            if self._engines.get(key) is engine:
                del self._engines[key]
            if not isinstance(error, LLMCollectError):
                cause, error = error, PolicyError(f"policy {label} did not start: {type(error).__name__}: {error}")
                error.__cause__ = cause
            engine.ready.set_exception(error)
            engine.ready.exception()  # read: nobody may be waiting any more
        else:
            engine.ready.set_result(None)

    def _close_all(self) -> None:
        """At exit: cancel what runs, so that no engine process is left behind."""

        async def close() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(Exception):
            self.submit(close()).result(timeout=15)
        self.loop.call_soon_threadsafe(self.loop.stop)


_lock = threading.Lock()
_current: tuple[int, EngineThread] | None = None


def engine_thread() -> EngineThread:
    """The engine thread of this process, started on first use; a forked child gets one of its own."""
    global _current
    with _lock:
        if _current is None or _current[0] != os.getpid():
            _current = (os.getpid(), EngineThread())
        return _current[1]


async def _close(engine: Engine) -> None:
    if not engine.ready.done():  # whoever waited was cancelled while the engine came up
        with contextlib.suppress(Exception):
            await asyncio.shield(engine.ready)
    if not engine.ready.exception():
        await asyncio.shield(asyncio.ensure_future(engine.policy.close()))


def _refuse_without_main_guard() -> None:
    """Say in one line why a spawned child imports the user's script and arrives here again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os.write(
            2,
            b"llmcollect: engines start by spawn, which imports your script again: "
            b'put what starts a collector under `if __name__ == "__main__":`\n',
        )
        os._exit(1)
