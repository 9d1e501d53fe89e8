"""The deployment for real: server, worker, `prefect deployment run`, what Prefect shows of it, and a cancellation."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from llmcollect import open_run
from llmcollect.errors import SpecError
from llmcollect.flows.collect import root_of_run
from tests.conftest import ENGINE_ARGS
from tests.servers.prefect import Deployment

ENV = {"target": "llmcollect.envs:ReasoningGymEnv", "kwargs": {"dataset": "gcd"}, "name": "gcd"}


def spec(policy: dict[str, Any], **changes: Any) -> str:
    run = {"envs": [ENV], "policies": [policy], "num_groups": 8, "group_size": 4, "num_shards": 2, **changes}
    return f"run={json.dumps(run)}"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_scheduled_run_completes_and_prefect_shows_it(deployment: Deployment, tiny: Path) -> None:
    policy = {"target": "llmcollect.policies:VLLMPolicy", "kwargs": {"model": str(tiny), **ENGINE_ARGS}}
    out = deployment.prefect(
        "deployment", "run", "collect/local", "--watch", "-p", spec(policy, sampling={"max_tokens": 16})
    )
    flow_id = re.search(r"UUID: (\S+)", out)
    assert flow_id, out
    run = open_run(deployment.folder / "runs" / flow_id[1])
    assert sorted(run.to_arrow()["trajectory"].to_pylist()) == list(range(32))

    mine = {"flow_runs": {"id": {"any_": [flow_id[1]]}}}
    assert [found["state"]["type"] for found in deployment.ask("flow_runs", **mine)] == ["COMPLETED"]
    tasks = deployment.ask("task_runs", **mine)
    assert {(task["name"], task["state"]["type"]) for task in tasks} == {
        ("shard-00000", "COMPLETED"),
        ("shard-00001", "COMPLETED"),
    }
    artifacts = {found["key"]: found for found in deployment.ask("artifacts", **mine)}
    assert set(artifacts) == {"shard-00000", "shard-00001", "collect-summary"}
    assert artifacts["shard-00000"]["data"] == 100
    assert "16/16 trajectories" in artifacts["shard-00000"]["description"]
    assert "| gcd | 32 | 32 |" in artifacts["collect-summary"]["data"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancelled_run_keeps_what_had_finished(deployment: Deployment) -> None:
    policy = {"target": "tests.fakes:BytePolicy", "kwargs": {"delay_s": 0.05}}
    limits = {"concurrency": 4, "commit_seconds": 1}
    root = deployment.folder / "cancelled"
    parameters = ["-p", spec(policy, num_groups=1_000_000, limits=limits), "-p", f"root={json.dumps(str(root))}"]
    out = deployment.prefect("deployment", "run", "collect/local", *parameters)
    flow_id = re.search(r"UUID: (\S+)", out)
    assert flow_id, out
    wait_until(lambda: len(list(root.glob("steps/*/*.parquet"))) >= 4, 120)
    deployment.prefect("flow-run", "cancel", flow_id[1])
    mine = {"flow_runs": {"id": {"any_": [flow_id[1]]}}}
    wait_until(lambda: deployment.ask("flow_runs", **mine)[0]["state"]["type"] == "CANCELLED", 60)
    rows = open_run(root).to_arrow()["trajectory"].to_pylist()
    assert len(rows) == len(set(rows)) > 0
    time.sleep(2)
    assert len(open_run(root).to_arrow()) == len(rows), "nothing goes on in the background"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_unknown_key_is_refused_when_the_run_is_scheduled_or_fails_clearly(deployment: Deployment) -> None:
    policy = {"target": "tests.fakes:BytePolicy"}
    deployment.prefect("deployment", "run", "collect/local", "-p", spec(policy, nun_groups=3), code=1)


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


def test_the_root_of_a_deployments_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "f00")
    assert root_of_run(None) == "runs/f00"
    assert root_of_run("here") == "here"
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "d00")
    with pytest.raises(SpecError, match="LLMCOLLECT_BASE"):
        root_of_run(None)
    with pytest.raises(SpecError, match=r"absolute root.*got 'here'"):
        root_of_run("here")
    monkeypatch.setenv("LLMCOLLECT_BASE", "/data/")
    assert root_of_run(None) == "/data/f00"
    assert root_of_run("s3://bucket/run") == "s3://bucket/run"
