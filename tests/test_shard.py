"""A shard collects what its plan lacks; what fails is recorded, and harms nothing else."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from llmcollect.admission import Admission
from llmcollect.batch import StepBatch
from llmcollect.errors import EnvError, PolicyError, RunFailedError, SpecError
from llmcollect.policies.engines import engine_thread
from llmcollect.preflight import check_components, open_root
from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec
from llmcollect.shard import collect_shard
from llmcollect.store import open_run
from llmcollect.store.writer import ShardWriter
from llmcollect.types import Step, Trajectory
from tests.fakes import BytePolicy


def spec(env: str = "CountEnv", policy: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    kwargs = changes.pop("env_kwargs", {})
    return RunSpec.parse(
        {
            "envs": [{"target": f"tests.fakes:{env}", "kwargs": kwargs, "name": "env"}],
            "policies": [{"target": "tests.fakes:BytePolicy", "kwargs": policy or {}}],
            "num_groups": 12,
            "group_size": 2,
            **changes,
        }
    )


def collect(run: RunSpec, root: Path | None = None, shard: int = 0) -> tuple[ShardProgress, list[dict[str, Any]]]:
    """Run one shard to its end: its counters, and all rows."""
    tables: list[pa.Table] = []

    async def go() -> ShardProgress:
        admission = Admission(run.limits.max_open_trajectories or 1000)

        async def emit(table: pa.Table, trajectories: Sequence[int]) -> None:
            tables.append(table)
            await admission.release(len(trajectories))

        opened = open_root(run, root) if root else None
        return await collect_shard(run, shard, root=opened, admission=admission, emit=emit)

    progress = engine_thread().submit(go()).result(timeout=60)
    return progress, pa.concat_tables(tables).to_pylist() if tables else []


def collect_into(run: RunSpec, root: Path) -> ShardProgress:
    """Run one shard to its end with nobody reading."""
    return engine_thread().submit(collect_shard(run, 0, root=open_root(run, root))).result(timeout=60)


def by_trajectory(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    grouped: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["trajectory"], []).append(row)
    return grouped


def test_every_trajectory_of_the_plan_is_collected_step_by_step() -> None:
    progress, rows = collect(spec(env_kwargs={"turns": 3}))
    found = by_trajectory(rows)
    assert sorted(found) == list(range(24))
    for number, steps in found.items():
        assert [row["step"] for row in steps] == [0, 1, 2]
        assert [row["terminated"] for row in steps] == [False, False, True]
        assert {(row["group"], row["sample"]) for row in steps} == {(number // 2, number % 2)}
        task = json.loads(steps[0]["task"])
        assert task == {"index": number // 2, "seed": task["seed"], "info": {"answer": task["seed"]}}
        assert [row["task"] for row in steps[1:]] == [None, None]
        assert json.loads(steps[0]["info"]) == {"left": 2}
        assert all(row["started_at"] <= row["generated_at"] <= row["finished_at"] for row in steps)
        assert all(row["policy_versions"] == [{"version": 3, "count": 8}] for row in steps)
    assert (progress.done, progress.steps, progress.tokens) == (24, 72, 72 * 8)


def test_prompts_hold_only_what_is_new() -> None:
    _, rows = collect(spec(num_groups=1, group_size=1))
    first, second = rows
    seed = json.loads(first["task"])["seed"]
    assert bytes(first["prompt_ids"][:-1]).decode() == f"question 0 {seed}"
    assert bytes(second["prompt_ids"][:-1]).decode() == "1 left"
    assert json.loads(second["messages"]) == [{"role": "user", "content": "1 left"}]
    assert json.loads(second["observation"]) == [{"role": "user", "content": "0 left"}]


@pytest.mark.parametrize("env", ["CountEnv", "AsyncCountEnv"])
def test_tokens_do_not_depend_on_concurrency_or_order(env: str) -> None:
    outcomes = []
    for concurrency in (1, 64):
        policy = {"delay_s": 0.001 * (concurrency > 1)}
        _, rows = collect(spec(env, policy, limits={"concurrency": concurrency}))
        outcomes.append(
            {(r["trajectory"], r["step"]): (r["prompt_ids"], r["response_ids"], r["reward"], r["seed"]) for r in rows}
        )
    assert outcomes[0] == outcomes[1]
    samples = [outcomes[0][number, 0][1] for number in (0, 1)]
    assert samples[0] != samples[1], "members of a group are sampled apart"


def test_blocking_envs_run_beside_each_other() -> None:
    began = time.monotonic()
    collect(spec(env_kwargs={"turns": 1, "delay_s": 0.2}, num_groups=16))
    assert time.monotonic() - began < 3, "32 trajectories of 0.2 s each, one after the other, take 6.4 s"


@pytest.mark.parametrize(
    ("fault", "error", "words", "step"),
    [
        ("reset", "ValueError", "bad reset", -1),
        ("reset type", "EnvError", "reset() of env env must give an Observation or a text; got int", -1),
        ("message", "EnvError", "a message without a role", -1),
        ("step", "ValueError", "bad step", 1),
        ("hang", "EnvError", "step took longer than 0.5 s", 1),
        ("step type", "EnvError", "step() of env env must return a Transition; got NoneType", 1),
        ("reward", "EnvError", "a reward that is no number; got 'high'", 1),
        ("exit", "EnvError", "SystemExit: 3", 1),
        ("stop iteration", "RuntimeError", "StopIteration", 1),
    ],
)
def test_a_failure_ends_its_own_trajectory(fault: str, error: str, words: str, step: int) -> None:
    run = spec(
        "FaultyEnv",
        env_kwargs={"fault": fault, "every": 4},
        limits={"step_timeout_s": 0.5, "max_attempts": 2, "max_failure_rate": 1},
    )
    progress, rows = collect(run)
    failed = {number for number, steps in by_trajectory(rows).items() if steps[-1]["failure"]}
    assert failed == {0, 1, 8, 9, 16, 17}
    assert progress.failed == 6
    for number in failed:
        steps = by_trajectory(rows)[number]
        failure = json.loads(steps[-1]["failure"])
        assert failure["type"] == error
        assert words in failure["message"]
        assert "Traceback" in failure["traceback"]
        assert steps[-1]["step"] == step
        assert steps[-1]["attempt"] == 1
        assert steps[-1]["reward"] is None
        if step == -1:
            assert steps[-1]["prompt_ids"] is None
        else:
            assert len(steps[-1]["response_ids"]) == 8, "what was generated before the fault is kept"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("finished", "cannot end before a step"),
        ("silent", "an observation without a message"),
        ("surrogate", "text that no tokenizer takes, a lone surrogate at 2"),
        ("info", "an info that is no mapping; got list"),
        ("no text", "content"),
    ],
)
def test_an_observation_that_cannot_be_is_a_recorded_failure(fault: str, words: str) -> None:
    limits = {"max_attempts": 1, "max_failure_rate": 1}
    progress, rows = collect(spec("FaultyEnv", env_kwargs={"fault": fault, "every": 4}, limits=limits))
    assert (progress.done, progress.failed) == (24, 6)
    failed = [row for row in rows if row["failure"]]
    assert {row["trajectory"] for row in failed} == {0, 1, 8, 9, 16, 17}
    assert all((row["step"], row["env"], row["prompt_ids"]) == (-1, "env", None) for row in failed)
    assert words in json.loads(failed[0]["failure"])["message"]


@pytest.mark.parametrize("text", ["a\x00b", "x" * 200_000, "\U0001f600 é \u2028", ""])
def test_odd_texts_come_through(text: str, tmp_path: Path) -> None:
    _, rows = collect(spec("TextEnv", {"context": 1 << 20}, env_kwargs={"text": text}, num_groups=1), tmp_path)
    assert bytes(i for i in rows[0]["prompt_ids"] if i < 256).decode() == text
    assert json.loads(rows[0]["messages"]) == [{"role": "user", "content": text}]
    assert open_run(tmp_path).to_arrow()["messages"].to_pylist() == [row["messages"] for row in rows]


def test_an_observation_that_is_too_long_truncates_the_trajectory_or_fails_its_first_step() -> None:
    progress, rows = collect(spec("TextEnv", {"context": 1000}, env_kwargs={"text": "x" * 200_000}, num_groups=1))
    assert progress.failed == 2
    assert json.loads(rows[0]["failure"])["type"] == "PromptTooLongError"


def test_an_env_that_replaces_the_context_begins_a_new_one(tmp_path: Path) -> None:
    _, rows = collect(spec("SummaryEnv", env_kwargs={"turns": 3}, num_groups=2), tmp_path)
    for steps in by_trajectory(rows).values():
        assert [row["context_reset"] for row in steps] == [False, False, True]
        assert bytes(steps[2]["prompt_ids"][:-1]) == b"In short."
    batch = StepBatch.concat(list(open_run(tmp_path).steps())).to_tensordict()
    last = batch[batch["collector", "step"] == 2]
    assert torch.equal(last["tokens", "prompt_length"], last["tokens", "new_prompt_length"])
    first = next(open_run(tmp_path).trajectories())
    assert [len(context.token_ids) > 0 for context in first.contexts] == [True, True]


def test_tools_pass_through(tmp_path: Path) -> None:
    policy = {"target": "tests.fakes:ToolPolicy"}
    run = RunSpec.parse(spec("ToolEnv", num_groups=1, group_size=1).model_dump() | {"policies": [policy]})
    _, rows = collect(run, tmp_path)
    assert json.loads(rows[0]["task"])["tools"][0]["function"]["name"] == "guess"
    assert b"'name': 'guess'" in bytes(i for i in rows[0]["prompt_ids"] if i < 256)
    message = json.loads(rows[0]["response_message"])
    assert message["tool_calls"][0]["function"] == {"name": "guess", "arguments": rows[0]["response_text"]}
    answer = {"role": "tool", "tool_call_id": "1", "content": rows[0]["response_text"].upper()}
    assert json.loads(rows[0]["observation"]) == json.loads(rows[1]["messages"]) == [answer]
    read = next(open_run(tmp_path).trajectories())
    assert [message["role"] for message in read.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert read.messages[1] == message


def test_a_constructor_that_hangs_has_a_time_out() -> None:
    limits = {"reset_timeout_s": 0.2, "max_attempts": 1, "max_failure_rate": 1}
    progress, rows = collect(spec("SlowStartEnv", env_kwargs={"seconds": 1.5}, num_groups=1, limits=limits))
    assert progress.failed == 2
    assert "making env env took longer than 0.2 s" in json.loads(rows[0]["failure"])["message"]


def test_a_late_result_is_dropped_and_counted() -> None:
    run = spec(
        "CountEnv",
        {"delay_s": 0.02},
        env_kwargs={"delay_s": 0.3},
        num_groups=4,
        limits={"step_timeout_s": 0.05, "max_attempts": 6, "concurrency": 2, "max_failure_rate": 1},
    )
    progress, rows = collect(run)
    assert progress.failed == 8
    assert progress.late_results > 0
    assert progress.hung_envs >= progress.late_results
    assert [row["step"] for row in rows] == [0] * 8
    assert all(row["reward"] is None for row in rows)


@pytest.mark.parametrize("env", ["CountEnv", "AsyncCountEnv"])
def test_a_dead_engine_is_replaced_and_the_trajectories_start_again(env: str, tmp_path: Path) -> None:
    expected = collect(spec(env))[1]
    policy = {"target": "tests.fakes:MortalPolicy", "kwargs": {"deaths": 2, "key": env}}
    run = RunSpec.parse(
        spec(env).model_dump() | {"policies": [policy], "limits": {"max_attempts": 1, "concurrency": 4}}
    )
    progress, rows = collect(run, tmp_path)
    assert (progress.done, progress.failed) == (24, 0)
    tokens = {(row["trajectory"], row["step"]): row["response_ids"] for row in rows}
    assert tokens == {(row["trajectory"], row["step"]): row["response_ids"] for row in expected}
    attempts = [attempt for commit in open_run(tmp_path).commits() for attempt in commit.failed_attempts]
    assert {attempt["type"] for attempt in attempts} == {"EngineDeadError"}
    assert 2 <= len(attempts) <= 8


def test_an_engine_that_keeps_dying_ends_the_run() -> None:
    policy = {"target": "tests.fakes:MortalPolicy", "kwargs": {"deaths": 99, "key": "ever"}}
    limits = {"max_engine_restarts": 2}
    run = RunSpec.parse(spec().model_dump() | {"policies": [policy], "limits": limits})
    with pytest.raises(PolicyError, match=r"died again after 2 restarts within an hour.*max_engine_restarts"):
        collect(run)


def test_too_many_calls_that_hang_stop_the_run() -> None:
    limits = {"step_timeout_s": 0.05, "max_attempts": 1, "max_failure_rate": 1, "max_hung_envs": 3, "concurrency": 2}
    with pytest.raises(RunFailedError, match=r"4 calls of envs do not return.*max_hung_envs=3.*isolate"):
        collect(spec("CountEnv", env_kwargs={"delay_s": 2}, limits=limits))


def test_what_a_grown_run_left_beyond_the_plan_does_not_count(tmp_path: Path) -> None:
    small = spec("AsyncCountEnv", num_groups=4)
    opened = open_root(small, tmp_path)
    writer = ShardWriter(opened.files, opened.record, small.model_copy(update={"num_groups": 50}), 0)
    step = Step(step=0, prompt_ids=[1], response_ids=[2], policy_versions=[(0, 1)], terminated=True)
    names = {"env": "env", "policy": "BytePolicy", "task": "{}", "attempt": 0}
    writer.append(
        [
            Trajectory(trajectory=n, group=n // 2, sample=n % 2, task_index=n // 2, steps=[step], **names)  # type: ignore[arg-type]
            for n in range(40, 48)
        ]
    )
    assert not open_run(tmp_path).holds(4)
    collect(small, tmp_path)
    assert open_run(tmp_path).holds(4)
    assert {*range(8)} <= set(open_run(tmp_path).to_arrow()["trajectory"].to_pylist())


def test_a_passing_fault_is_tried_again_with_a_fresh_env(tmp_path: Path) -> None:
    marker = tmp_path / "marks"
    marker.mkdir()
    run = spec("FaultyEnv", env_kwargs={"fault": "step", "every": 3, "marker": str(marker)}, group_size=1)
    progress, rows = collect(run, tmp_path / "run")
    assert progress.failed == 0
    attempts = {number: steps[-1]["attempt"] for number, steps in by_trajectory(rows).items()}
    assert attempts == {number: int(number % 3 == 0) for number in range(12)}
    recorded = [attempt for commit in open_run(tmp_path / "run").commits() for attempt in commit.failed_attempts]
    assert sorted(attempt["trajectory"] for attempt in recorded) == [0, 3, 6, 9]
    assert recorded[0]["message"] == "bad step"


def test_too_many_failures_stop_the_run_and_lose_nothing(tmp_path: Path) -> None:
    run = spec(
        "FaultyEnv",
        env_kwargs={"fault": "step"},
        num_groups=1000,
        limits={"max_attempts": 1, "concurrency": 4, "max_open_trajectories": 8},
    )
    with pytest.raises(RunFailedError, match=r"20 of the last 20 .*max_failure_rate=0\.5.*ValueError: bad step"):
        collect(run, tmp_path)
    stored = open_run(tmp_path)
    assert len({row["trajectory"] for row in stored.to_arrow(include_failed=True).to_pylist()}) >= 20
    assert stored.to_arrow().num_rows == 0


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"env": "FaultyEnv", "env_kwargs": {"fault": "constructor"}},
            EnvError,
            "could not be made: OSError: no dataset",
        ),
        ({"env": "not_an_env"}, EnvError, "without a reset"),
        ({"env": "CountEnv", "env_kwargs": {"turn": 3}}, SpecError, "unexpected keyword argument 'turn'"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_starts(
    change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        check_components(spec(**change))


def test_an_engine_that_does_not_start_ends_the_shard() -> None:
    with pytest.raises(PolicyError, match="no such weights"):
        collect(spec(policy={"fault": "start"}))


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("logprobs", PolicyError, "8 token ids, 7 log-probs"),
        ("raise", ConnectionError, "engine says no"),
    ],
)
def test_a_policy_that_breaks_its_protocol_fails_the_trajectory(fault: str, error: type[Exception], words: str) -> None:
    progress, rows = collect(spec(policy={"fault": fault}, num_groups=2, limits={"max_attempts": 1}))
    assert progress.failed == 4
    failure = json.loads(rows[0]["failure"])
    assert failure["type"] == error.__name__
    assert words in failure["message"]
    assert rows[0]["prompt_ids"]


def test_a_prompt_that_does_not_fit_fails_at_once_and_the_run_goes_on() -> None:
    policy = {"context": 20}
    envs = [
        {"target": "tests.fakes:CountEnv", "kwargs": {"text": "a" * 50}, "name": "long"},
        {"target": "tests.fakes:CountEnv", "kwargs": {"text": "", "turns": 1}, "name": "short"},
    ]
    run = spec(policy=policy, limits={"max_failure_rate": 1}).model_copy(
        update={"envs": RunSpec.parse({"envs": envs, "policies": [{"target": "m:P"}]}).envs}
    )
    _, rows = collect(run)
    for steps in by_trajectory(rows).values():
        if steps[0]["env"] == "long":
            assert json.loads(steps[0]["failure"])["type"] == "PromptTooLongError"
            assert (steps[0]["step"], steps[0]["attempt"], steps[0]["response_ids"]) == (0, 0, None)
        else:
            assert steps[-1]["terminated"]
    assert {row["env"] for row in rows} == {"long", "short"}


@pytest.mark.parametrize(
    ("change", "steps", "reason"),
    [
        ({"limits": {"max_turns": 2}}, 2, "max_turns"),
        ({"limits": {"max_trajectory_tokens": 60}}, 3, "max_trajectory_tokens"),
        ({"policy": {"context": 60}}, 3, "context"),
    ],
)
def test_conversation_limits_truncate(change: dict[str, Any], steps: int, reason: str) -> None:
    _, rows = collect(spec(env_kwargs={"turns": 9}, num_groups=1, group_size=1, **change))
    assert len(rows) == steps
    assert (rows[-1]["truncated"], rows[-1]["terminated"], rows[-1]["failure"]) == (True, False, None)
    assert rows[-1]["finish_reason"] == reason
    assert rows[-1]["reward"] is not None


def test_odd_info_and_nan_rewards_are_kept() -> None:
    _, rows = collect(spec("OddInfoEnv", num_groups=1))
    info = json.loads(rows[0]["info"])
    assert (info["score"], info["array"], info["raw"], info["text"]) == (
        0.5,
        [0, 1, 2],
        {"base64": "AP8="},
        "\ud800\x00",
    )
    assert info["5"]["type"] == "builtins.object"
    assert rows[0]["reward"] != rows[0]["reward"]


def test_zero_length_responses_are_legal() -> None:
    _, rows = collect(spec(policy={"tokens": 0}, num_groups=1))
    assert all((row["response_ids"], row["response_logprobs"], row["policy_versions"]) == ([], [], []) for row in rows)


def test_a_resumed_shard_does_what_is_missing(tmp_path: Path) -> None:
    run = spec(num_groups=6)
    collect(run, tmp_path)
    progress, rows = collect(run, tmp_path)
    assert (progress.stored, progress.done, rows) == (12, 0, [])
    larger = run.model_copy(update={"num_groups": 10})
    progress, rows = collect(larger, tmp_path)
    assert (progress.stored, progress.done) == (12, 8)
    assert sorted(by_trajectory(rows)) == list(range(12, 20))
    stored = [row["trajectory"] for row in open_run(tmp_path).to_arrow().to_pylist() if row["step"] == 0]
    assert sorted(stored) == list(range(20))
    assert len(list(tmp_path.glob("ends/shard-00000/*.json"))) == 2


def test_a_cancelled_shard_keeps_what_had_finished(tmp_path: Path) -> None:
    run = spec(
        "AsyncCountEnv",
        {"delay_s": 0.005},
        num_groups=100_000,
        limits={"concurrency": 4, "commit_seconds": 3600, "max_open_trajectories": 1000},
    )
    progress = ShardProgress(0)
    opened = open_root(run, tmp_path)
    job = engine_thread().submit(collect_shard(run, 0, root=opened, progress=progress))
    while progress.done < 50:
        time.sleep(0.01)
    job.cancel()
    job.wait()
    assert isinstance(job.outcome.exception(), asyncio.CancelledError)
    stored = set(open_run(tmp_path).to_arrow()["trajectory"].to_pylist())
    assert len(stored) == progress.done


def test_shards_that_name_one_policy_share_its_engine_and_the_last_closes_it() -> None:
    run = spec("AsyncCountEnv", {"delay_s": 0.002, "name": "shared"}, num_shards=4, num_groups=16)
    started, closed = BytePolicy.started, BytePolicy.closed

    async def go() -> None:
        await asyncio.gather(*(collect_shard(run, shard) for shard in range(4)))

    engine_thread().submit(go()).result(timeout=60)
    assert (BytePolicy.started - started, BytePolicy.closed - closed) == (1, 1)


def test_admission_waits_for_room_and_tells_when_engines_starve() -> None:
    async def go() -> list[int]:
        starving: list[int] = []
        admission = Admission(4, busy=3)
        admission.when_starving(lambda: starving.append(admission.running))
        await admission.admit(2)
        await admission.admit(2)
        waiting = asyncio.create_task(admission.admit(2))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        admission.finish()
        assert starving == [], "three still run, and that is enough"
        admission.finish()
        assert starving == [2]
        await admission.release(1)
        await asyncio.sleep(0.01)
        assert not waiting.done(), "half a group gets no room"
        await admission.release(1)
        await waiting
        assert (admission.open, admission.running) == (4, 4)
        return starving

    assert asyncio.run(go())[0] == 2


def test_a_run_that_waits_for_its_store_still_makes_few_files(tmp_path: Path) -> None:
    run = spec("AsyncCountEnv", num_groups=200, limits={"concurrency": 4, "max_open_trajectories": 44})
    collect_into(run, tmp_path)
    sizes = [len(commit.trajectories) for commit in open_run(tmp_path).commits()]
    assert sum(sizes) == 400
    assert min(sizes[:-1]) >= 40, "a commit takes what has finished until the engine would idle"


def test_a_bound_of_one_group_does_not_deadlock(tmp_path: Path) -> None:
    run = spec(limits={"max_open_trajectories": 2, "commit_seconds": 3600})
    for root in (None, tmp_path):
        progress, _ = collect(run, root)
        assert progress.done == 24
