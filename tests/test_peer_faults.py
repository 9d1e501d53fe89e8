"""Faults that were seen in the collectors that this one learns from, each shown not to happen here.

Observed with TorchRL 0.14: its LLMCollector, RayLLMCollector and the async envs that they run.
"""

import queue
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch

import llmcollect.collector
from llmcollect import Limits, LLMCollector
from llmcollect.errors import RunFailedError
from llmcollect.streaming import EndOfRun
from tests.fakes import AsyncCountEnv, BytePolicy, CountEnv, FaultyEnv
from tests.servers.prefect import REPO


def collector(**changes: Any) -> LLMCollector:
    arguments = {"env": partial(AsyncCountEnv, 1), "policy": BytePolicy, "steps_per_batch": 5, "num_groups": 60}
    return LLMCollector(**(arguments | changes))


def test_a_full_queue_drops_no_rows() -> None:
    sink: queue.Queue[Any] = queue.Queue(maxsize=1)
    collecting = collector()
    collecting.start(queue=sink)
    rows: list[int] = []
    while not isinstance(item := sink.get(timeout=20), EndOfRun):
        time.sleep(0.02)  # slower than the collection
        rows += item["collector", "traj_ids"].tolist()
    assert sorted(rows) == list(range(60))


def test_a_consumer_hears_of_an_exception_in_the_background() -> None:
    everything_fails = {"env": partial(FaultyEnv, "step", turns=1), "limits": Limits(max_attempts=1)}
    sink: queue.Queue[Any] = queue.Queue()
    streaming = collector(**everything_fails)
    streaming.start(queue=sink)
    assert isinstance(sink.get(timeout=20).error, RunFailedError)
    with pytest.raises(RunFailedError):
        streaming.join(20)
    with pytest.raises(RunFailedError):
        next(streaming)
    with pytest.raises(RunFailedError):
        next(collector(**everything_fails))


def test_one_env_of_four_that_raises_ends_its_own_trajectories_alone() -> None:
    envs = [partial(CountEnv, 1, text=letter) for letter in "abc"]
    collecting = collector(env=[*envs, partial(FaultyEnv, "step", turns=1)], limits=Limits(max_attempts=1))
    whole = torch.cat(list(collecting))
    assert len(whole) == 45
    assert set(whole["collector", "env"]) == {"CountEnv:a", "CountEnv:b", "CountEnv:c"}
    assert sum(shard.failed for shard in collecting.progress()) == 15


@pytest.mark.parametrize("total", [1, 12, 13])
def test_the_total_of_steps_is_exact(total: int) -> None:
    assert sum(map(len, collector(num_groups=None, total_steps=total))) == total


def test_lists_of_constructors_are_taken() -> None:
    whole = torch.cat(
        list(
            collector(
                env=[partial(AsyncCountEnv, 1), partial(CountEnv, 1)],
                policy=[partial(BytePolicy, name="a"), partial(BytePolicy, name="b")],
            )
        )
    )
    assert set(whole["collector", "env"]) == {"AsyncCountEnv", "CountEnv"}
    assert set(whole["collector", "policy"]) == {"BytePolicy:a", "BytePolicy:b"}


@pytest.mark.parametrize("env", [AsyncCountEnv, CountEnv])
def test_each_token_has_its_policy_version_whatever_the_env(env: type) -> None:
    versions = collector(env=partial(env, 2))
    for batch in versions:
        length = batch["tokens", "response_length"][:, None]
        sampled = torch.arange(batch["tokens", "response"].shape[1]) < length
        assert (batch["tokens", "policy_version"][sampled] == 3).all()  # what BytePolicy says
        assert (batch["tokens", "policy_version"][~sampled] == -1).all()


@pytest.mark.slow
def test_the_surface_is_the_same_with_ray(ray_cluster: None) -> None:
    options = {"runtime_env": {"env_vars": {"PYTHONPATH": str(REPO)}}}
    collecting = collector(backend="ray", backend_options=options, num_groups=None, total_steps=20)
    with collecting:
        assert (collecting.is_running(), collecting.progress(), collecting.dropped_groups) == (False, [], 0)
        assert len(next(collecting)) == 5
        assert collecting.progress()[0].done >= 5
        assert collecting.spec.policy_names == ["BytePolicy"]
        assert iter(collecting) is collecting
        assert sum(map(len, collecting)) == 15
        collecting.join(5)
        collecting.stop()


def test_an_interrupted_consumer_leaves_no_env_out_and_loses_no_row() -> None:
    collecting = collector(env=[partial(CountEnv, 1, text=letter) for letter in "abcd"], num_groups=2000)
    rows: list[Any] = []
    interrupts = 0

    def interrupt(signum: int, frame: Any) -> None:
        while frame is not None:  # what has arrived in the loop is the loop's to keep
            if frame.f_code.co_filename == llmcollect.collector.__file__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        while True:
            try:
                for batch in collecting:
                    rows += zip(batch["collector", "traj_ids"].tolist(), batch["collector", "env"], strict=True)
                break
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 5
    assert {env for _, env in rows} == {f"CountEnv:{letter}" for letter in "abcd"}
    assert sorted(number for number, _ in rows) == list(range(2000))
