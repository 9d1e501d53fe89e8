"""EngineThread: the one thread of a process that owns the event loop, all engines and every rollout.

An engine belongs to one loop for its whole life (awaiting vLLM's from a second loop hangs, and it dies with the first).
So the loop outlives whoever asks: a facade, a flow, two collectors. Engines are counted by their spec: shards and
collectors that name the same policy share one, and the last to leave closes it.
"""

import asyncio
import concurrent.futures
import concurrent.futures.thread  # its own hook at exit must be registered first: hooks run in reverse order
import contextlib
import gc
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmcollect.components import ComponentSpec
from llmcollect.errors import EngineDeadError, LLMCollectError, PolicyError, SpecError
from llmcollect.policies.base import Policy
from llmcollect.run import Limits

T = TypeVar("T")
_RESTART_WINDOW_S = 3600.0
_EXIT_S = 30.0


class Engine:
    """A policy, started, with the slots of its trajectories. Belongs to the engine thread's loop.

    Attributes:
        policy: The policy that serves now; another one after `replace`.
        slots: One a trajectory in flight; as many as the first who asked for the engine has `concurrency`.
        users: Who lease it.
    """

    def __init__(self, spec: ComponentSpec, concurrency: int) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        self.users = 0
        self._weights: tuple[Path, int] | None = None
        self._updating = asyncio.Lock()
        self._restarts: deque[float] = deque()
        self._spec = spec
        self._begin()

    async def ready(self) -> None:
        """Wait until the policy has started.

        Raises:
            PolicyError: It cannot be started.
        """
        await asyncio.shield(self._starting)

    async def replace(self, dead: Policy, max_restarts: int) -> None:
        """Put a new policy in the place of one that died, unless somebody else has; wait until it has started.

        Raises:
            PolicyError: It cannot be started, or died too often.
        """
        if self.policy is dead:
            now = time.monotonic()
            while self._restarts and now - self._restarts[0] > _RESTART_WINDOW_S:
                self._restarts.popleft()
            if len(self._restarts) >= max_restarts:
                raise PolicyError(
                    f"the engine of policy {self._spec.label} died again after {len(self._restarts)} restarts within "
                    f"an hour, as many as max_engine_restarts allows"
                )
            self._restarts.append(now)
            self._begin(dead)
        await self.ready()

    async def update_weights(self, folder: Path, version: int | None, max_restarts: int) -> int:
        """Give the policy other weights while it serves; an engine that replaces a dead one gets them too.

        Args:
            folder: Where they are.
            version: Their number, greater than that of the last ones; None: the next one.
            max_restarts: As for `replace`, should the engine not survive it.

        Returns:
            The version.

        Raises:
            SpecError: The policy has no `update_weights`, or the version is none that may follow.
            PolicyError: They cannot be loaded; the old ones serve on.
        """
        async with self._updating:
            await self.ready()
            policy, last = self.policy, self._weights[1] if self._weights else 0
            update = getattr(policy, "update_weights", None)
            if update is None:
                raise SpecError(f"policy {self._spec.label} cannot take other weights: it has no update_weights()")
            number = last + 1 if version is None else version
            if number <= last:
                raise SpecError(f"version must be greater than {last}, that of the weights before; got {number}")
            try:
                await update(folder, number)
            except EngineDeadError as error:
                await self.replace(policy, max_restarts)
                raise PolicyError(f"{error}; the engine was started again with the weights before") from error
            self._weights = folder, number
            return number

    async def close(self) -> None:
        """Free it, also when whoever waited was cancelled while it came up."""
        with contextlib.suppress(Exception):
            await asyncio.shield(self._starting)
        if not self._starting.cancelled() and not self._starting.exception():
            await asyncio.shield(asyncio.ensure_future(self.policy.close()))

    @property
    def failed(self) -> bool:
        """Whether it could not be started."""
        return self._starting.done() and self._starting.exception() is not None

    def _begin(self, dead: Policy | None = None) -> None:
        self.policy: Policy = self._spec.build()
        self._starting = asyncio.get_running_loop().create_task(self._start(self.policy, dead))
        self._starting.add_done_callback(_read)

    async def _start(self, policy: Policy, dead: Policy | None) -> None:
        if dead is not None:
            with contextlib.suppress(Exception):
                await dead.close()
        try:
            await policy.start()
            if self._weights is not None:
                await policy.update_weights(*self._weights)  # type: ignore[attr-defined]
            _spare_the_collector()
        except LLMCollectError:
            raise
        except Exception as error:
            raise PolicyError(f"policy {self._spec.label} did not start: {type(error).__name__}: {error}") from error


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
        self._jobs: set[Job[Any]] = set()
        # Before the interpreter stops its thread pools, on which commits and engines depend; atexit would be after.
        threading._register_atexit(self._close_all)  # type: ignore[attr-defined]

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Job[T]":
        """Start a coroutine on the loop; from any thread."""
        job = Job(self.loop, coroutine)
        self._jobs.add(job)
        job.outcome.add_done_callback(lambda _: self._jobs.discard(job))
        return job

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
        if engine is None or engine.failed:
            engine = self._engines[key] = Engine(spec, concurrency)
        engine.users += 1
        try:
            await engine.ready()
            yield engine
        finally:
            engine.users -= 1
            if not engine.users:
                if self._engines.get(key) is engine:
                    del self._engines[key]
                await engine.close()

    async def update_weights(self, spec: ComponentSpec, limits: Limits, folder: Path, version: int | None) -> int:
        """`Engine.update_weights` of a policy's engine. Only on the loop."""
        async with self.lease(spec, limits.concurrency) as engine:
            return await engine.update_weights(folder, version, limits.max_engine_restarts)

    def _close_all(self) -> None:
        """At exit: end what runs, so that what has finished is committed and no engine process is left behind."""
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        concurrent.futures.wait([job.outcome for job in jobs], timeout=_EXIT_S)
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


def _spare_the_collector() -> None:
    """Leave what the libraries have loaded out of Python's garbage collections.

    There are millions of objects once an engine is up, none of them garbage, and each full collection over them would
    stop every rollout for half a second.
    """
    gc.collect()
    gc.freeze()


def _read(task: "asyncio.Task[None]") -> None:
    """Take note of a task's error: perhaps nobody waits for it, and asyncio would report it as lost."""
    if not task.cancelled():
        task.exception()


def _refuse_without_main_guard() -> None:
    """Say in one line why a spawned child imports the user's script and arrives here again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os.write(
            2,
            b"llmcollect: engines start by spawn, which imports your script again: "
            b'put what starts a collector under `if __name__ == "__main__":`\n',
        )
        os._exit(1)
