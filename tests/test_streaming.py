"""Into a queue or a buffer: everything once, back-pressure instead of loss, and no silent death."""

import asyncio
import multiprocessing
import queue
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from llmcollect import Limits, LLMCollector
from llmcollect.errors import RunFailedError, SpecError
from llmcollect.streaming import EndOfRun
from tests.fakes import AsyncCountEnv, BytePolicy, FaultyEnv


def collector(**changes: Any) -> LLMCollector:
    arguments: dict[str, Any] = {
        "env": partial(AsyncCountEnv, 1),
        "policy": BytePolicy,
        "steps_per_batch": 10,
        "num_groups": 55,
    }
    return LLMCollector(**(arguments | changes))


class ListBuffer:
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def extend(self, batch: Any) -> None:
        self.batches.append(batch)


def test_a_buffer_gets_every_row_once() -> None:
    buffer = ListBuffer()
    collecting = collector()
    collecting.start(replay_buffer=buffer)
    collecting.join(30)
    assert sorted(torch.cat(buffer.batches)["collector", "traj_ids"].tolist()) == list(range(55))
    assert not collecting.is_running()


def test_a_full_queue_blocks_and_drops_nothing() -> None:
    sink: queue.Queue[Any] = queue.Queue(maxsize=1)
    collecting = collector(limits=Limits(max_open_trajectories=10))
    collecting.start(queue=sink)
    time.sleep(0.5)
    assert collecting.is_running()
    rows = []
    while not isinstance(item := sink.get(timeout=10), EndOfRun):
        rows += item["collector", "traj_ids"].tolist()
    assert sorted(rows) == list(range(55))
    assert item.error is None
    collecting.join(5)


def test_what_ends_the_collection_reaches_queue_and_join() -> None:
    sink: queue.Queue[Any] = queue.Queue()
    collecting = collector(env=partial(FaultyEnv, "step"), limits=Limits(max_attempts=1))
    collecting.start(queue=sink)
    assert isinstance(sink.get(timeout=20).error, RunFailedError)
    with pytest.raises(RunFailedError):
        collecting.join(5)


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def rows_from(sink: Any, results: Any) -> None:
    """In another process: which rows came, and how they ended."""
    rows: list[int] = []
    while not isinstance(item := sink.get(timeout=100), EndOfRun):
        rows += item["collector", "traj_ids"].tolist()
        assert item["text", "response"][0]
    results.put((rows, item.error))


@pytest.mark.slow
def test_another_process_reads_a_queue_to_its_end() -> None:
    context = multiprocessing.get_context("spawn")
    sink, results = context.Queue(2), context.Queue()
    reader = context.Process(target=rows_from, args=(sink, results))
    reader.start()
    collecting = collector()
    collecting.start(queue=sink)
    rows, error = results.get(timeout=100)
    assert (sorted(rows), error) == (list(range(55)), None)
    reader.join(20)

    reader = context.Process(target=rows_from, args=(sink, results))
    reader.start()

    def broken(batch: Any) -> Any:
        raise Unpicklable(1, 2)

    collecting = collector(postproc=broken)
    collecting.start(queue=sink)
    rows, error = results.get(timeout=100)
    assert rows == []
    assert str(error) == "Unpicklable: 1 and 2"
    with pytest.raises(Unpicklable):
        collecting.join(20)
    reader.join(20)


def test_what_cannot_be_sent_to_another_process_is_an_error_and_not_lost() -> None:
    sink = multiprocessing.get_context("spawn").Queue(4)
    collecting = collector(postproc=lambda batch: {"batch": batch, "lock": threading.Lock()})
    collecting.start(queue=sink)
    assert "pickle" in str(sink.get(timeout=20).error)
    with pytest.raises(TypeError, match="pickle"):
        collecting.join(20)


def test_an_asyncio_queue_belongs_to_a_loop() -> None:
    with pytest.raises(SpecError, match="from a coroutine"):
        collector().start(queue=asyncio.Queue())
    collecting = collector(num_groups=None)

    async def leave() -> None:
        sink: asyncio.Queue[Any] = asyncio.Queue(1)
        collecting.start(queue=sink)
        await sink.get()

    asyncio.run(leave())
    with pytest.raises(Exception, match="loop") as caught:
        collecting.join(20)
    assert isinstance(caught.value, RunFailedError)


def test_a_stopped_stream_ends_an_asyncio_queue_that_is_full() -> None:
    async def main() -> Any:
        sink: asyncio.Queue[Any] = asyncio.Queue(1)
        collecting = collector(num_groups=None)
        collecting.start(queue=sink)
        while not sink.full():  # noqa: ASYNC110 - a queue has no event for it
            await asyncio.sleep(0.01)
        await asyncio.to_thread(collecting.stop, now=True)
        await asyncio.to_thread(collecting.join, 20)
        return await sink.get()

    assert asyncio.run(main()) == EndOfRun()


def test_what_a_buffer_raises_is_raised_by_join() -> None:
    class Broken:
        def extend(self, batch: Any) -> None:
            raise OverflowError("full")

    closed = BytePolicy.closed
    collecting = collector(num_groups=None, policy=partial(BytePolicy, name="broken sink"))
    collecting.start(replay_buffer=Broken())
    with pytest.raises(OverflowError, match="full"):
        collecting.join(20)
    assert BytePolicy.closed == closed + 1, "and the engine is free"


def test_stop_ends_a_stream_that_waits_for_room() -> None:
    sink: queue.Queue[Any] = queue.Queue(maxsize=1)
    closed = BytePolicy.closed
    collecting = collector(num_groups=None, policy=partial(BytePolicy, name="stopped"))
    collecting.start(queue=sink)
    while not sink.full():
        time.sleep(0.01)
    collecting.stop(now=True)
    collecting.join(10)
    assert BytePolicy.closed == closed + 1
    assert isinstance(sink.get(timeout=5), EndOfRun), "nobody waits for ever"


def test_a_stream_has_one_reader_and_one_sink() -> None:
    collecting = collector(num_groups=None)
    with pytest.raises(SpecError, match="one of them"):
        collecting.start()
    with pytest.raises(SpecError, match=r"extend\(\); got _List"):
        collecting.start(replay_buffer=_List())
    collecting.start(queue=queue.Queue(1))
    with pytest.raises(SpecError, match="streams already"):
        collecting.start(queue=queue.Queue(1))
    with pytest.raises(SpecError, match="in the background"):
        next(collecting)
    with pytest.raises(TimeoutError):
        collecting.join(0.1)
    collecting.stop(now=True)


class _List:
    """Has no extend()."""
