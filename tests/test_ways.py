"""Every way of reading over every backend: the same trajectories, each once, with the same tokens."""

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmcollect import Limits, LLMCollector, open_run
from llmcollect.streaming import EndOfRun
from tests.fakes import BytePolicy, CountEnv, FaultyEnv
from tests.servers.prefect import REPO, Deployment

Rows = dict[tuple[int, int], dict[str, Any]]
Way = Callable[[LLMCollector, Path], list[Any]]

ARGUMENTS: dict[str, Any] = {
    "env": [(partial(CountEnv, 3), 3.0), partial(FaultyEnv, "step", every=7)],
    "policy": [partial(BytePolicy, name="a"), partial(BytePolicy, tokens=5, name="b")],
    "steps_per_batch": 10,
    "num_groups": 12,
    "group_size": 2,
    "num_shards": 2,
    "limits": Limits(max_attempts=1, max_failure_rate=1, commit_rows=16),
}


def by_iteration(collector: LLMCollector, root: Path) -> list[Any]:
    return list(collector)


def by_next(collector: LLMCollector, root: Path) -> list[Any]:
    batches = []
    while (batch := next(collector, None)) is not None:
        batches.append(batch)
    return batches


def by_async_for(collector: LLMCollector, root: Path) -> list[Any]:
    async def read() -> list[Any]:
        return [batch async for batch in collector]

    return asyncio.run(read())


def by_replay_buffer(collector: LLMCollector, root: Path) -> list[Any]:
    from torchrl.data import LazyStackStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyStackStorage(1000), batch_size=4)
    collector.start(replay_buffer=buffer)
    collector.join(200)
    return [buffer[:]]


def drained(sink: Any) -> list[Any]:
    batches = []
    while not isinstance(item := sink.get(timeout=200), EndOfRun):
        batches.append(item)
    assert item.error is None
    return batches


def by_queue(collector: LLMCollector, root: Path) -> list[Any]:
    sink: queue.Queue[Any] = queue.Queue(maxsize=1)
    collector.start(queue=sink)
    return drained(sink)


def by_process_queue(collector: LLMCollector, root: Path) -> list[Any]:
    sink = multiprocessing.get_context("spawn").Queue(1)
    collector.start(queue=sink)
    return drained(sink)


def by_asyncio_queue(collector: LLMCollector, root: Path) -> list[Any]:
    async def read() -> list[Any]:
        sink: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        collector.start(queue=sink)
        batches = []
        while not isinstance(item := await asyncio.wait_for(sink.get(), 200), EndOfRun):
            batches.append(item)
        return batches

    return asyncio.run(read())


def by_ray_queue(collector: LLMCollector, root: Path) -> list[Any]:
    from ray.util.queue import Queue

    sink = Queue(maxsize=1, actor_options={"num_cpus": 0})
    collector.start(queue=sink)
    batches = drained(sink)
    sink.shutdown()
    return batches


def by_tail(collector: LLMCollector, root: Path) -> list[Any]:
    collecting = threading.Thread(target=list, args=[collector])
    collecting.start()
    batches = [batch.to_tensordict() for batch in open_run(root).tail(poll_seconds=0.1)]
    collecting.join()
    return batches


def by_files(collector: LLMCollector, root: Path) -> list[Any]:
    list(collector)
    return [batch.to_tensordict() for batch in open_run(root).steps()]


WAYS = [
    by_iteration,
    by_next,
    by_async_for,
    by_replay_buffer,
    by_queue,
    by_process_queue,
    by_asyncio_queue,
    by_ray_queue,
    by_tail,
    by_files,
]
# A queue of another kind differs in its end alone, which is the same behind every backend.
WAYS_OF_PREFECT = [by_iteration, by_async_for, by_replay_buffer, by_queue, by_tail, by_files]


def rows_of(batches: list[Any]) -> Rows:
    """By trajectory and step, without what differs between two runs: times, and who wrote them."""
    found: Rows = {}
    for batch in batches:
        for row in batch:
            key = int(row["collector", "traj_ids"]), int(row["collector", "step"])
            assert key not in found, f"{key} came twice"
            length = int(row["tokens", "prompt_length"]), int(row["tokens", "response_length"])
            found[key] = {
                "prompt": row["tokens", "prompt"].tolist()[: length[0]],
                "response": row["tokens", "response"].tolist()[: length[1]],
                "log_probs": row["log_probs", "response"].tolist()[: length[1]],
                "reward": float(row["next", "reward"]),
                "done": bool(row["next", "done"]),
                "env": row["collector", "env"],
                "policy": row["collector", "policy"],
                "text": row["text", "response"],
            }
    return found


@pytest.fixture(scope="module")
def expected() -> Rows:
    """The rows that each way has to find: as the store of a run in this process has them."""
    rows = rows_of(list(LLMCollector(**ARGUMENTS)))
    assert {policy for row in rows.values() for policy in [row["policy"]]} == {"BytePolicy:a", "BytePolicy:b"}
    assert {row["env"] for row in rows.values()} == {"CountEnv", "FaultyEnv:step"}
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_locally(way: Way, expected: Rows, tmp_path: Path, ray_cluster: None) -> None:
    assert rows_of(way(LLMCollector(**ARGUMENTS, root=tmp_path), tmp_path)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_on_two_ray_actors(way: Way, expected: Rows, tmp_path: Path, ray_cluster: None) -> None:
    options = {"num_cpus": 1, "runtime_env": {"env_vars": {"PYTHONPATH": str(REPO)}}}
    collector = LLMCollector(**ARGUMENTS, root=tmp_path, backend="ray", backend_options=options)
    assert rows_of(way(collector, tmp_path)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_OF_PREFECT)
def test_as_a_deployment(
    way: Way, expected: Rows, tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", deployment.url)
    collector = LLMCollector(**ARGUMENTS, root=tmp_path, backend="prefect", backend_options={"poll_seconds": 0.1})
    assert rows_of(way(collector, tmp_path)) == expected
