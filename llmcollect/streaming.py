"""Streaming a collector's batches into a queue or a replay buffer, in a thread of its own.

    next(collector) -> sink(batch) -> ... -> sink(EndOfRun) for a queue

The thread waits for batches and for room in the sink; `stop` unblocks both. What ends it early is kept and raised by
`join`, and travels on the end marker, so that no consumer waits for a producer that is dead.
"""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing.queues
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from llmcollect.errors import RunFailedError, SpecError, portable

_PATIENCE_S = 0.5  # how soon a stop is seen by who waits for a full queue


@dataclass(frozen=True, slots=True)
class EndOfRun:
    """The last item on a queue: nothing follows.

    Attributes:
        error: What ended the collection; None if the run is complete or was stopped. On its way to another process an
            error that cannot be pickled becomes a RunFailedError that says the same.
    """

    error: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EndOfRun, (None if self.error is None else portable(self.error, RunFailedError),)


class ReplayBuffer(Protocol):
    """Anything that batches can be added to, TorchRL's replay buffers among them."""

    def extend(self, batch: Any) -> Any:
        """Add the rows of a batch."""
        ...


class Queue(Protocol):
    """`queue.Queue`, `multiprocessing.Queue`, `ray.util.queue.Queue` and what behaves like them."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> Any:
        """Add an item; `queue.Full` if there was no room within the time."""
        ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take an item; `queue.Empty` if there is none."""
        ...


class Stream:
    """One background stream. Made by `LLMCollector.start`."""

    def __init__(
        self,
        batches: Iterator[Any],
        replay_buffer: ReplayBuffer | None,
        queue: "Queue | asyncio.Queue[Any] | None",
        on_error: Callable[[], None],
    ) -> None:
        if (replay_buffer is None) == (queue is None):
            raise SpecError("start() streams into either a replay_buffer or a queue: pass one of them")
        for sink, method in ((replay_buffer, "extend"), (queue, "put")):
            if sink is not None and not callable(getattr(sink, method, None)):
                raise SpecError(f"start() needs an object with {method}(); got {type(sink).__name__}")
        self._batches, self._on_error = batches, on_error
        self._deliver: Callable[[Any], Any] = self._put if replay_buffer is None else replay_buffer.extend
        self._queue = _as_queue(queue)
        self._stopped = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="llmcollect stream", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Whether more may come."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            TimeoutError: It has not come in time.
            LLMCollectError: What ended the collection, or whatever the sink raised.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the collection still runs after {timeout:g} s")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Deliver no further batch. Does not wait."""
        self._stopped.set()

    def _work(self) -> None:
        try:
            for batch in self._batches:
                if self._stopped.is_set():
                    break
                self._deliver(batch)
        except BaseException as error:  # noqa: BLE001 - raised by join()
            self.error = error
            self._on_error()
        if self._queue is not None:
            try:
                self._put(EndOfRun(self.error))
            except Exception as error:  # noqa: BLE001 - the queue is gone, and so is who would read it
                self.error = self.error or error

    def _put(self, item: Any) -> None:
        """Wait for room; once stopped, only the end marker still has to get in, if need be in the place of a batch."""
        assert self._queue is not None
        while True:
            try:
                self._queue.put(item, timeout=_PATIENCE_S)
                return
            except queue.Full:
                if not self._stopped.is_set():
                    continue
                if not isinstance(item, EndOfRun):
                    return
                with contextlib.suppress(queue.Empty):
                    self._queue.get(block=False)


def _as_queue(queue: Any) -> Queue | None:
    """The queue, as one that blocks a thread and either takes an item or raises."""
    if isinstance(queue, asyncio.Queue):
        return _LoopQueue(queue)
    if isinstance(queue, multiprocessing.queues.Queue):
        return _ProcessQueue(queue)
    return queue  # type: ignore[no-any-return]


class _LoopQueue:
    """An asyncio.Queue, which belongs to the loop that runs in this thread now."""

    def __init__(self, queue: "asyncio.Queue[Any]") -> None:
        self._queue = queue
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise SpecError(
                "start(queue=asyncio.Queue()) must be called from a coroutine of the queue's loop"
            ) from None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        async def offer() -> None:
            async with asyncio.timeout(timeout):  # a put that is cancelled has put nothing
                await self._queue.put(item)

        try:
            self._on_loop(offer)
        except TimeoutError:
            raise queue.Full from None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        async def take() -> Any:
            return self._queue.get_nowait()

        try:
            return self._on_loop(take)
        except asyncio.QueueEmpty:
            raise queue.Empty from None

    def _on_loop(self, make: Callable[[], Any]) -> Any:
        while not self._loop.is_closed():
            coroutine = make()
            try:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError:  # closed in this moment
                coroutine.close()
                break
            while not self._loop.is_closed():
                done, _ = concurrent.futures.wait([future], _PATIENCE_S)
                if done:
                    return future.result()
        raise RunFailedError("the event loop of the asyncio.Queue has ended, and nobody can read from it")


class _ProcessQueue:
    """A multiprocessing.Queue, which pickles in a thread of its own, where an error would lose the item."""

    def __init__(self, queue: "multiprocessing.queues.Queue[Any]") -> None:
        self._queue = queue
        self._last: tuple[Any, _Pickled] | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._last is None or self._last[0] is not item:  # a full queue is asked many times
            self._last = item, _Pickled(pickle.dumps(item))
        self._queue.put(self._last[1], block, timeout)
        self._last = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return self._queue.get(block, timeout)


@dataclass(frozen=True, slots=True)
class _Pickled:
    """Comes out of a pickle as what it is the pickle of: with tensors as bytes, which outlive this process."""

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)
