"""isolate="process": an env behind a pipe gives the same rows, and its crash or hang costs one trajectory."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmcollect.errors import EnvError
from llmcollect.preflight import check_components
from llmcollect.run import RunSpec
from tests.test_shard import by_trajectory, collect

LIMITS = {"concurrency": 2, "max_attempts": 1, "max_failure_rate": 1}


def isolated(env: str = "CountEnv", where: str = "process", **changes: Any) -> RunSpec:
    kwargs = changes.pop("env_kwargs", {})
    limits = LIMITS | changes.pop("limits", {})
    return RunSpec.parse(
        {
            "envs": [{"target": f"tests.fakes:{env}", "kwargs": kwargs, "name": "env", "isolate": where}],
            "policies": [{"target": "tests.fakes:BytePolicy"}],
            "num_groups": 6,
            "limits": limits,
            **changes,
        }
    )


def comparable(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    columns = ("trajectory", "step", "response_ids", "reward", "info", "task", "observation")
    return sorted(tuple(map(str, (row[column] for column in columns))) for row in rows)


def env_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.parametrize("env", ["CountEnv", "AsyncCountEnv"])
def test_a_process_gives_the_rows_that_a_thread_gives(env: str) -> None:
    assert comparable(collect(isolated(env))[1]) == comparable(collect(isolated(env, where="thread"))[1])


@pytest.mark.parametrize(
    ("fault", "limits", "kind", "words"),
    [
        ("die", {}, "EnvError", "the process of env env ended with exit code 3 during step()"),
        ("sleep", {"step_timeout_s": 1, "max_hung_envs": 0}, "EnvError", "step took longer than 1 s"),
        ("step", {}, "ValueError", "bad step"),
    ],
)
def test_a_crash_or_a_hang_costs_one_trajectory(fault: str, limits: dict[str, Any], kind: str, words: str) -> None:
    run = isolated("FaultyEnv", env_kwargs={"fault": fault, "every": 3}, limits=limits)
    progress, rows = collect(run)
    assert (progress.done, progress.failed) == (6, 2)
    for number, steps in by_trajectory(rows).items():
        failure = json.loads(steps[-1]["failure"] or "null")
        if number % 3:
            assert failure is None
            assert steps[-1]["terminated"]
        else:
            assert failure["type"] == kind
            assert words in failure["message"]
            assert fault != "step" or "tests/fakes.py" in failure["traceback"], "the other process's own traceback"
    deadline = time.monotonic() + 20
    while env_processes():
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.1)


def test_info_that_cannot_cross_arrives_as_it_would_be_stored() -> None:
    _, rows = collect(isolated("OddInfoEnv", num_groups=1))
    info = json.loads(rows[0]["info"])
    assert info["raw"] == {"base64": "AP8="}
    assert info["score"] == 0.5
    assert info["5"]["type"] == "builtins.object"


def test_a_constructor_that_raises_there_is_refused_here() -> None:
    with pytest.raises(EnvError, match="could not be made: OSError: no dataset here"):
        check_components(isolated("FaultyEnv", env_kwargs={"fault": "constructor"}))


def test_where_an_env_runs_is_no_part_of_what_a_run_is(tmp_path: Path) -> None:
    from llmcollect.preflight import open_root

    open_root(isolated(where="thread"), tmp_path)
    open_root(isolated(where="process"), tmp_path)
