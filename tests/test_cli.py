"""The command line: the whole job as a user runs it, killed and started again, and refusals in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmcollect import open_run
from llmcollect.cli import main
from tests.conftest import ENGINE_ARGS

ENV = {"target": "llmcollect.envs:ReasoningGymEnv", "kwargs": {"dataset": "gcd"}, "name": "gcd"}
VLLM = "llmcollect.policies:VLLMPolicy"
FAKE = {"target": "tests.fakes:BytePolicy"}


def spec_file(folder: Path, policy: dict[str, Any] = FAKE, **changes: Any) -> str:
    file = folder / "run.json"
    file.write_text(json.dumps({"envs": [ENV], "policies": [policy], "num_groups": 8, "group_size": 4, **changes}))
    return str(file)


def environment(home: Path) -> dict[str, str]:
    """A Prefect home of the test's own; what is imported by path is found."""
    repo = str(Path(__file__).resolve().parents[1])
    return os.environ | {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "prefect" / "storage"),
        "PYTHONPATH": repo,
        "COLUMNS": "100",
    }


def llmcollect(*arguments: str, home: Path, **pipes: Any) -> "subprocess.Popen[str]":
    pipes = pipes or {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "llmcollect.cli", *arguments], env=environment(home), text=True, **pipes
    )


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_collect_prints_a_table_conversations_and_how_to_read_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    process = llmcollect("collect", "--run", spec_file(tmp_path), "--root", str(root), home=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    table = next(line for line in out.splitlines() if line.split()[:1] == ["gcd"])
    assert table.split()[1:4] == ["32", "32", "256"]
    assert out.count("Find the Greatest Common Divisor") == 2
    assert f"python -m llmcollect.cli show {root}" in out
    assert "shard 0" in err
    for chatter in ("Warning", "INFO", "uvicorn", "Traceback"):
        assert chatter not in err + out
    again = llmcollect("collect", "--run", spec_file(tmp_path), "--root", str(root), home=tmp_path)
    out, err = again.communicate(timeout=60)
    assert "The run is complete" in out
    assert err == "", "no server, no engine"
    main_exit(["show", str(root), "--conversations", "0"], 0)


@pytest.mark.slow
@pytest.mark.engine
def test_an_interrupted_run_says_so_and_keeps_what_had_finished(tmp_path: Path, tiny: Path) -> None:
    """Ctrl-C in a terminal: the engine and the server get the signal as well."""
    policy = {"target": VLLM, "kwargs": {"model": str(tiny), **ENGINE_ARGS}}
    limits = {"commit_rows": 16, "concurrency": 8}
    file = spec_file(tmp_path, policy, num_groups=5000, sampling={"max_tokens": 64}, limits=limits)
    root = tmp_path / "run"
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        process = llmcollect(
            "collect", "--run", file, "--root", str(root), home=tmp_path, stdout=out, stderr=err, start_new_session=True
        )
    wait_until(lambda: len(list(root.glob("steps/*/*.parquet"))) >= 2 or process.poll() is not None, 200)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    text = (tmp_path / "err").read_text()
    assert text.splitlines()[-1].startswith("error: interrupted; what had finished is kept")
    for chatter in ("Traceback", "ERROR", "Crashed", "Cancelled"):
        assert chatter not in text
    assert (tmp_path / "out").read_text() == ""
    wait_until(lambda: not any(child.is_running() for child in children), 30)
    run = open_run(root)
    assert run.to_arrow().num_rows >= 32
    assert not any(commit.failed for commit in run.commits()), "what was in flight has not failed"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_killed_run_is_completed_and_nothing_is_twice(tmp_path: Path, tiny: Path) -> None:
    """kill -9 in the middle, with the real engine; then the same command again."""
    policy = {"target": VLLM, "kwargs": {"model": str(tiny), **ENGINE_ARGS}}
    file = spec_file(
        tmp_path,
        policy,
        num_groups=150,
        num_shards=2,
        sampling={"max_tokens": 64},
        limits={"commit_rows": 16, "concurrency": 8, "max_open_trajectories": 32},
    )
    root = tmp_path / "run"
    with open(tmp_path / "log", "w") as log:
        first = llmcollect("collect", "--run", file, "--root", str(root), home=tmp_path, stdout=log, stderr=log)
    wait_until(lambda: len(list(root.glob("steps/*/*.parquet"))) >= 4 or first.poll() is not None, 200)
    assert first.poll() is None, (tmp_path / "log").read_text()
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = open_run(root).to_arrow(include_failed=True)["trajectory"].to_pylist()
    assert 0 < len(before) < 600, "it was killed in the middle"
    assert not list(root.glob("ends/*/*"))
    assert len(children) >= 2, "an engine and a server"
    wait_until(lambda: not any(child.is_running() for child in children), 30)  # nothing holds the GPU any more

    second = llmcollect("collect", "--run", file, "--root", str(root), home=tmp_path)
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    run = open_run(root)
    after = run.to_arrow(include_failed=True)["trajectory"].to_pylist()
    assert sorted(after) == list(range(600))
    assert len({record.writer for record in run.commits()}) == 4, "two shards, before and after"
    assert len(list(root.glob("ends/*/*.json"))) == 2


def main_exit(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"num_groups": 0}, 2, "num_groups"),
        ({"num_gruops": 1}, 2, "num_gruops"),
        ({"num_groups": None}, 2, "has no num_groups"),
        ({"envs": [{"target": "llmcollect.envs:Missing"}]}, 2, "has no 'Missing'"),
        ({"envs": [{**ENV, "kwargs": {"dataset": "gcd", "max_valu": 1}}]}, 2, "max_valu"),
        ({"envs": [{"target": "tests.fakes:CountEnv", "kwargs": {"x": 1}}]}, 2, "unexpected keyword argument 'x'"),
        ({"envs": [{"target": "tests.fakes:FaultyEnv", "kwargs": {"fault": "constructor"}}]}, 1, "no dataset here"),
        (
            {"policies": [{"target": VLLM, "kwargs": {"model": "/no/model"}}]},
            2,
            "/no/model",
        ),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], code: int, words: str
) -> None:
    main_exit(["collect", "--run", spec_file(tmp_path, **change), "--root", str(tmp_path / "run")], code)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["collect", "--rot", "x"], 2, "--rot"),
        (["collect", "--run", "{tmp}/none.json"], 2, "cannot read"),
        (["collect", "--run", "{tmp}/text"], 2, "not JSON"),
        (["collect", "--root", "{tmp}/text/run"], 1, "cannot read"),
        (["collect", "--num-groups", "0"], 2, "num_groups"),
        (["show", "{tmp}"], 1, "holds no run"),
        (["gather"], 2, "gather"),
    ],
)
def test_bad_arguments_are_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "text").write_text("not json")
    main_exit([argument.format(tmp=tmp_path) for argument in arguments], code)
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_root_of_another_run_is_refused_with_the_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llmcollect.preflight import open_root
    from llmcollect.run import RunSpec

    spec = json.loads(Path(spec_file(tmp_path)).read_text())
    open_root(RunSpec.parse(spec), tmp_path / "run")
    other = spec_file(tmp_path, seed=3, group_size=2)
    main_exit(["collect", "--run", other, "--root", str(tmp_path / "run")], 2)
    err = capsys.readouterr().err
    assert "seed (stored 0, asked for 3)" in err
    assert "group_size (stored 4, asked for 2)" in err
