"""What goes wrong where shards run: actors that die, flow runs that fail, consumers that are interrupted."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from llmcollect import Limits, LLMCollector, open_run
from llmcollect.errors import PolicyError, RunFailedError, SpecError
from tests.fakes import AsyncCountEnv, BytePolicy, CountEnv, FaultyEnv
from tests.servers.prefect import REPO, Deployment

IMPORTABLE = {"runtime_env": {"env_vars": {"PYTHONPATH": str(REPO)}}}


def collector(**changes: Any) -> LLMCollector:
    arguments = {"env": partial(AsyncCountEnv, 2), "policy": BytePolicy, "steps_per_batch": 8, "num_groups": 60}
    return LLMCollector(**(arguments | changes))


def on_ray(**changes: Any) -> LLMCollector:
    options = IMPORTABLE | changes.pop("options", {})
    return collector(backend="ray", backend_options=options, **changes)


def numbers(batches: list[Any]) -> list[tuple[int, int]]:
    whole = torch.cat(batches)
    return sorted(zip(whole["collector", "traj_ids"].tolist(), whole["collector", "step"].tolist(), strict=True))


def actors() -> list[psutil.Process]:
    """Processes of shard actors on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::ShardActor" in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def assert_no_actors() -> None:
    """They are gone, or go in a moment."""
    deadline = time.monotonic() + 20
    while actors() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not actors()


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False])
def test_an_actor_that_is_killed_is_replaced_and_nothing_comes_twice(
    stored: bool, tmp_path: Path, ray_cluster: None
) -> None:
    collecting = on_ray(
        root=tmp_path if stored else None,
        policy=[partial(BytePolicy, name="a", delay_s=0.02), partial(BytePolicy, name="b", delay_s=0.02)],
        limits=Limits(concurrency=2, commit_rows=4),
    )
    batches = [next(collecting)]
    first = actors()
    assert len(first) == 2
    first[0].kill()
    batches += list(collecting)
    assert numbers(batches) == [(number, step) for number in range(60) for step in range(2)]
    if stored:
        assert sorted(set(open_run(tmp_path).to_arrow()["trajectory"].to_pylist())) == list(range(60))
    collecting.close()


@pytest.mark.slow
def test_actors_that_die_again_and_again_end_the_collection(ray_cluster: None) -> None:
    collecting = on_ray(env=partial(FaultyEnv, "die", turns=1), options={"max_restarts": 1})
    with pytest.raises(RunFailedError, match="a Ray actor died, after 1 were replaced"):
        next(collecting)
    collecting.close()


@pytest.mark.slow
def test_what_fails_in_an_actor_is_raised_as_itself(ray_cluster: None) -> None:
    with pytest.raises(PolicyError, match="no such weights"):
        next(on_ray(policy=partial(BytePolicy, fault="start")))
    with pytest.raises(RunFailedError, match="max_failure_rate"):
        list(on_ray(env=partial(FaultyEnv, "step"), limits=Limits(max_attempts=1)))
    assert_no_actors()


@pytest.mark.slow
def test_closing_frees_the_actors_and_so_does_the_end(ray_cluster: None) -> None:
    with on_ray(num_groups=None) as collecting:
        next(collecting)
        assert actors()
    assert_no_actors()
    ended = on_ray(num_groups=4)
    assert sum(map(len, ended)) == 8
    assert_no_actors()


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("slurm", None, "backend must be one of 'local', 'ray', 'prefect'; got 'slurm'"),
        ("local", {"num_gpus": 1}, "backend_options of 'local' are not valid: num_gpus"),
        ("ray", {"gpus": 1}, "backend_options of 'ray' are not valid: gpus"),
        ("prefect", {}, "needs a root"),
    ],
)
def test_a_bad_backend_is_one_line(backend: str, options: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        collector(backend=backend, backend_options=options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prefect_needs_a_server_and_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(SpecError, match="needs num_groups"):
        collector(backend="prefect", root=tmp_path, num_groups=None)
    with pytest.raises(SpecError, match=r"no Prefect server answers at http://127\.0\.0\.1:9/api"):
        next(collector(backend="prefect", root=tmp_path))


@pytest.mark.slow
def test_a_flow_run_that_fails_is_raised_after_its_rows(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", deployment.url)
    collecting = collector(
        backend="prefect",
        root=tmp_path,
        backend_options={"poll_seconds": 0.1},
        env=[(partial(CountEnv, 1), 1.0), (partial(FaultyEnv, "step", turns=1), 1.0)],
        limits=Limits(max_failure_rate=0.2, max_attempts=1, concurrency=4),
    )
    rows: list[Any] = []
    with pytest.raises(RunFailedError, match=r"flow run .* is Failed"):
        rows.extend(collecting)
    assert rows


@pytest.mark.slow
def test_a_flow_run_that_is_cancelled_is_raised_and_the_end_cancels_one(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", deployment.url)
    endless = {
        "backend": "prefect",
        "backend_options": {"poll_seconds": 0.1},
        "num_groups": 1_000_000,
        "policy": partial(BytePolicy, delay_s=0.05),
        "limits": Limits(concurrency=4, commit_seconds=0.5),
    }
    collecting = collector(root=tmp_path / "a", **endless)
    next(collecting)
    newest = deployment.ask("flow_runs", sort="START_TIME_DESC", limit=1)[0]
    deployment.prefect("flow-run", "cancel", newest["id"])
    with pytest.raises(RunFailedError, match=r"is Cancel"):
        list(collecting)

    bounded = collector(root=tmp_path / "b", total_steps=20, **endless)
    assert sum(map(len, bounded)) == 20
    newest = deployment.ask("flow_runs", sort="START_TIME_DESC", limit=1)[0]
    assert newest["state"]["type"] == "CANCELLED"

    with collector(root=tmp_path / "c", **endless) as closing:
        next(closing)
    newest = deployment.ask("flow_runs", sort="START_TIME_DESC", limit=1)[0]
    assert newest["state"]["type"] == "CANCELLED"


@pytest.mark.slow
def test_a_flow_run_that_no_worker_takes_says_so(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", deployment.url)
    deployment.prefect("work-pool", "pause", "llmcollect-local")
    try:
        options = {"pickup_timeout_s": 3, "poll_seconds": 0.1}
        with pytest.raises(RunFailedError, match="worker"):
            next(collector(backend="prefect", root=tmp_path, backend_options=options))
        with pytest.raises(SpecError, match=r"no deployment 'collect/nowhere'"):
            next(collector(backend="prefect", root=tmp_path, backend_options={"deployment": "collect/nowhere"}))
    finally:
        deployment.prefect("work-pool", "resume", "llmcollect-local")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("policy", "reading"),
    [
        ("partial(VLLMPolicy, {tiny!r}, dtype='float32', kv_cache_memory_bytes=1 << 28)", "iterating()"),
        ("partial(BytePolicy, delay_s=0.01)", "streaming()"),
    ],
)
def test_ctrl_c_leaves_no_process_behind_and_what_had_finished_is_stored(
    policy: str, reading: str, tiny: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import queue\n"
        "from functools import partial\n"
        "from llmcollect import Limits, LLMCollector, Sampling\n"
        "from llmcollect.policies import VLLMPolicy\n"
        "from tests.fakes import BytePolicy, CountEnv\n"
        "def iterating():\n"
        "    for batch in collector: print(len(batch), flush=True)\n"
        "def streaming():\n"
        "    sink = queue.Queue(1)\n"
        "    collector.start(queue=sink)\n"
        "    while True: print(len(sink.get()), flush=True)\n"
        "if __name__ == '__main__':\n"
        f"    policy = {policy.format(tiny=str(tiny))}\n"
        "    collector = LLMCollector(CountEnv, policy, steps_per_batch=4, root='run', seed=1,\n"
        "        sampling=Sampling(max_tokens=8), limits=Limits(commit_seconds=1))\n"
        f"    {reading}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline().strip() == "4"
    children = psutil.Process(process.pid).children(recursive=True)
    assert bool(children) == ("VLLMPolicy" in policy), "the engine's process"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, -signal.SIGKILL)
    assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    rows = open_run(tmp_path / "run").to_arrow()["trajectory"].to_pylist()
    assert len(rows) >= 20
