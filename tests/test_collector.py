"""The facade: batches of the right size, each row once, live rows equal to stored ones."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcollect import Limits, LLMCollector, StepBatch, open_run
from llmcollect.errors import EnvError, RunFailedError, RunMismatchError, SpecError
from tests.fakes import AsyncCountEnv, BytePolicy, CountEnv, FaultyEnv

ENV = partial(CountEnv, 3)


def collector(**changes: Any) -> LLMCollector:
    arguments = {"env": ENV, "policy": BytePolicy, "steps_per_batch": 10, "num_groups": 8, "group_size": 2} | changes
    return LLMCollector(**arguments)


def plain(batches: list[Any]) -> str:
    rows = [row for batch in batches for row in StepBatch.from_tensordict(batch).to_arrow().to_pylist()]
    return repr(sorted(rows, key=lambda row: (row["trajectory"], row["step"])))


def columns(batch: Any) -> list[list[int]]:
    return [batch["collector", name].tolist() for name in ("traj_ids", "step")]


@pytest.mark.parametrize("shards", [1, 3])
def test_batches_have_their_size_and_every_step_comes_once(shards: int) -> None:
    batches = list(collector(num_shards=shards))
    assert [len(batch) for batch in batches] == [10, 10, 10, 10, 8]
    whole = torch.cat(batches)
    steps = list(zip(whole["collector", "traj_ids"].tolist(), whole["collector", "step"].tolist(), strict=True))
    assert sorted(steps) == [(number, step) for number in range(16) for step in range(3)]
    context = whole["tokens", "prompt_length"] + whole["tokens", "response_length"]
    assert torch.equal(context, whole["masks", "all_attention_mask"].sum(1)), "also for steps whose trajectory was cut"


def test_live_rows_equal_stored_rows(tmp_path: Path) -> None:
    live = list(collector(root=tmp_path, num_shards=2))
    stored = [batch.to_tensordict() for batch in open_run(tmp_path).steps()]
    assert plain(live) == plain(stored)


def test_a_root_that_holds_a_part_is_completed(tmp_path: Path) -> None:
    first = collector(root=tmp_path, num_groups=100_000, limits=Limits(commit_rows=8))
    seen = [next(first) for _ in range(3)]
    first.close()
    stored = {row["trajectory"] for row in open_run(tmp_path).to_arrow().to_pylist()}
    assert {n for batch in seen for n in batch["collector", "traj_ids"].tolist()} <= stored

    size = max(stored) // 2 + 20
    # The run was to be larger; a new root shows the same for a run of one size.
    with pytest.raises(RunMismatchError, match="may only grow"):
        collector(root=tmp_path, num_groups=size)
    again = collector(root=tmp_path, num_groups=100_000, limits=Limits(commit_rows=8))
    new = {n for _ in range(3) for n in next(again)["collector", "traj_ids"].tolist()}
    again.close()
    assert not new & stored


def test_a_complete_run_yields_nothing_new(tmp_path: Path) -> None:
    assert sum(len(batch) for batch in collector(root=tmp_path)) == 48
    assert list(collector(root=tmp_path)) == []
    grown = list(collector(root=tmp_path, num_groups=9))
    assert sorted(set(torch.cat(grown)["collector", "traj_ids"].tolist())) == [16, 17]


def test_a_loop_that_was_left_goes_on_where_it_stopped() -> None:
    collecting = collector()
    first = []
    for batch in collecting:
        first.append(batch)
        if len(first) == 2:
            break
    whole = torch.cat([*first, *collecting])
    assert (
        len(set(zip(whole["collector", "traj_ids"].tolist(), whole["collector", "step"].tolist(), strict=True))) == 48
    )
    with pytest.raises(StopIteration):
        next(collecting)


def test_a_slow_consumer_stops_new_groups_and_loses_nothing() -> None:
    collecting = collector(
        env=partial(AsyncCountEnv, 1), num_groups=200, steps_per_batch=4, limits=Limits(max_open_trajectories=10)
    )
    batch = next(collecting)
    threading.Event().wait(0.5)
    assert sum(shard.done for shard in collecting.progress()) <= 30
    rows = len(batch) + sum(len(batch) for batch in collecting)
    assert rows == 400


def test_a_run_without_end_can_be_closed() -> None:
    closed = BytePolicy.closed
    with collector(num_groups=None, policy=partial(BytePolicy, name="endless")) as collecting:
        assert [len(next(collecting)) for _ in range(5)] == [10] * 5
    assert BytePolicy.closed == closed + 1
    with pytest.raises(StopIteration):
        next(collecting)


def test_a_script_that_ends_without_close_commits_what_had_finished(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from functools import partial\n"
        "from llmcollect import Limits, LLMCollector\n"
        "from tests.fakes import AsyncCountEnv, BytePolicy\n"
        "if __name__ == '__main__':\n"
        "    limits = Limits(concurrency=8, commit_seconds=1, max_open_trajectories=4000)\n"
        "    policy = partial(BytePolicy, delay_s=0.01)\n"
        "    collector = LLMCollector(AsyncCountEnv, policy, steps_per_batch=4, root='run', limits=limits)\n"
        "    next(collector)\n"
        "    while collector.progress()[0].done < 400: time.sleep(0.01)\n"
        "    print(collector.progress()[0].done, flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    stored = open_run(tmp_path / "run").to_arrow()["trajectory"].to_pylist()
    assert len(set(stored)) >= int(done.stdout) >= 400


def test_what_ends_the_collection_is_raised_after_the_rows_before_it() -> None:
    collecting = collector(
        env=[(partial(CountEnv, 1), 1.0), (partial(FaultyEnv, "step", turns=1), 1.0)],
        num_groups=None,
        steps_per_batch=1,
        limits=Limits(max_failure_rate=0.2, max_attempts=1),
    )
    envs = set()

    def consume() -> None:
        for batch in collecting:
            envs.update(batch["collector", "env"])

    with pytest.raises(RunFailedError, match="max_failure_rate"):
        consume()
    assert envs == {"CountEnv"}


def test_rows_that_are_held_when_the_collection_fails_are_handed_out_first() -> None:
    collecting = collector(
        env=[(partial(CountEnv, 1), 1.0), (partial(FaultyEnv, "step", turns=1), 1.0)],
        num_groups=None,
        steps_per_batch=1000,
        limits=Limits(max_failure_rate=0.2, max_attempts=1),
    )
    assert 0 < len(next(collecting)) < 1000
    with pytest.raises(RunFailedError, match="max_failure_rate"):
        next(collecting)
    with pytest.raises(StopIteration):
        next(collecting)


def test_two_threads_share_the_stream() -> None:
    collecting = collector(num_groups=100, steps_per_batch=7)
    read: list[Any] = []
    threads = [threading.Thread(target=lambda: read.extend(collecting)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {batch["collector", "traj_ids"].shape for batch in read} <= {(7,), (600 % 7,)}
    steps = [key for batch in read for key in zip(*columns(batch), strict=True)]
    assert sorted(steps) == [(number, step) for number in range(200) for step in range(3)]


def test_async_for_lets_the_loop_run_shares_the_stream_and_survives_a_cancellation() -> None:
    collecting = collector(env=partial(AsyncCountEnv, 1), num_groups=60, policy=partial(BytePolicy, delay_s=0.01))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def read(batches: list[Any], cancelled: bool) -> None:
        while True:
            try:
                batches.append(await asyncio.wait_for(anext(collecting), 0.001 if cancelled else 60))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return

    async def main() -> list[Any]:
        batches: list[Any] = []
        ticking = asyncio.create_task(tick())
        await asyncio.gather(read(batches, True), read(batches, False), read(batches, False))
        ticking.cancel()
        return batches

    found = torch.cat(asyncio.run(main()))
    assert sorted(found["collector", "traj_ids"].tolist()) == list(range(120))
    assert ticks > 10


def test_async_for_raises_what_ends_the_collection() -> None:
    async def read() -> None:
        async for _ in collector(env=partial(FaultyEnv, "step"), num_groups=60, limits=Limits(max_attempts=1)):
            pass

    with pytest.raises(RunFailedError, match="max_failure_rate"):
        asyncio.run(read())


@pytest.mark.parametrize("yields", ["steps", "groups"])
def test_a_resume_may_replay_what_is_stored(yields: Any, tmp_path: Path) -> None:
    first = list(collector(root=tmp_path))
    assert plain(list(collector(root=tmp_path, resume="replay", yields=yields))) == plain(first)
    grown = torch.cat(list(collector(root=tmp_path, resume="replay", num_groups=9, yields=yields)))
    assert len(grown) == 54
    assert set(grown["collector", "traj_ids"].tolist()) == set(range(18))


def test_stop_lets_what_is_in_flight_finish() -> None:
    policy = partial(BytePolicy, delay_s=0.01, name="stopping")
    with collector(num_groups=None, policy=policy) as collecting:
        first = next(collecting)
        collecting.stop()
        whole = torch.cat([first, *collecting])
    steps = whole["collector", "step"][whole["next", "done"][:, 0]]
    assert len(steps) * 3 == len(whole), "whole trajectories"


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("device", "policies place themselves"),
        ("frames_per_batch", "steps_per_batch"),
        ("create_env_kwargs", "functools.partial"),
        ("exploration_type", "sampling=Sampling(temperature=...)"),
        ("total_dialog_turns", "total_steps"),
        ("nun_groups", "did you mean 'num_groups'?"),
        ("zebra", "LLMCollector has no argument 'zebra'"),
    ],
)
def test_removed_arguments_name_what_replaces_them(argument: str, instead: str) -> None:
    with pytest.raises(TypeError, match=re.escape(instead)):
        collector(**{argument: 1})


def test_whole_trajectories_are_yielded() -> None:
    batches = list(collector(yields="trajectories", env=partial(CountEnv, 4)))
    assert [len(batch) for batch in batches] == [12, 12, 12, 12, 12, 4]
    for batch in batches:
        numbers, counts = batch["collector", "traj_ids"].unique(return_counts=True)
        assert counts.tolist() == [4] * len(numbers)


def test_last_steps_hold_whole_conversations() -> None:
    batches = list(collector(yields="last_steps"))
    assert [len(batch) for batch in batches] == [10, 6]
    whole = torch.cat(batches)
    assert sorted(whole["collector", "traj_ids"].tolist()) == list(range(16))
    assert set(whole["collector", "step"].tolist()) == {2}
    assert whole["next", "done"].all()
    rows = torch.cat(list(collector()))
    first = rows[(rows["collector", "step"] == 0) & (rows["collector", "traj_ids"] == 5)]
    last = whole[whole["collector", "traj_ids"] == 5]
    length = int(first["tokens", "prompt_length"] + first["tokens", "response_length"])
    assert torch.equal(last["tokens", "full"][0, :length], first["tokens", "full"][0, :length])


@pytest.mark.parametrize("bound", [2, None])
@pytest.mark.parametrize("size", [1, 10])
def test_whole_groups_are_yielded_even_with_room_for_one(bound: int | None, size: int) -> None:
    limits = Limits(max_open_trajectories=bound, commit_seconds=3600)
    batches = list(collector(yields="groups", steps_per_batch=size, limits=limits))
    assert all(len(batch) >= size for batch in batches[:-1])
    for batch in batches:
        numbers, counts = batch["collector", "group"].unique(return_counts=True)
        assert counts.tolist() == [6] * len(numbers)
        assert set(batch["group", "arrived"].tolist()) == set(batch["group", "expected"].tolist()) == {2}
    assert sum(map(len, batches)) == 48


@pytest.mark.parametrize(("policy", "groups"), [("keep", 8), ("drop", 6)])
def test_groups_that_lost_a_member_are_kept_and_flagged_or_dropped(policy: str, groups: int, tmp_path: Path) -> None:
    """Of tasks 0 and 5 the first try in this process fails, which is one member's."""
    markers = tmp_path / "markers"
    markers.mkdir()
    env = partial(FaultyEnv, "step", every=5, marker=str(markers))
    limits = Limits(max_attempts=1, on_incomplete_group=policy, max_failure_rate=1)  # type: ignore[arg-type]
    root = tmp_path / "run"
    collecting = collector(env=env, yields="groups", limits=limits, root=root)
    whole = torch.cat(list(collecting))
    assert collecting.dropped_groups == 8 - groups
    assert len(set(whole["collector", "group"].tolist())) == groups
    flags = zip(*(whole["group", name].tolist() for name in ("expected", "arrived", "failed")), strict=True)
    assert set(flags) == ({(2, 2, 0), (2, 1, 1)} if policy == "keep" else {(2, 2, 0)})
    records = open_run(root).group_records()
    assert [record.group for record in records if not record.complete] == [0, 5]
    assert [(record.expected, record.arrived, record.failed) for record in records][:2] == [(2, 1, 1), (2, 2, 0)]


def test_a_group_that_is_completed_after_a_resume_has_its_stored_members(tmp_path: Path) -> None:
    arguments = {"group_size": 4, "env": partial(CountEnv, 2), "root": tmp_path, "yields": "groups"}
    list(collector(**arguments, limits=Limits(commit_rows=1, concurrency=1)))
    # One at a time: cut off in the middle of a group, the store is as a crash there would have left it.
    held = 0
    for commit in open_run(tmp_path).commits():
        if held % 4:
            (tmp_path / "steps" / "shard-00000" / f"{commit.number:08d}.parquet").unlink()
        else:
            held += len(commit.trajectories)
    for end in tmp_path.glob("ends/*/*"):
        end.unlink()
    assert any(0 < record.arrived < 4 for record in open_run(tmp_path).group_records())
    done = {record.group for record in open_run(tmp_path).group_records() if record.complete}
    rest = torch.cat(list(collector(**arguments)))
    numbers, counts = rest["collector", "group"].unique(return_counts=True)
    assert set(numbers.tolist()) == set(range(8)) - done
    assert set(counts.tolist()) == {8}


@pytest.mark.parametrize(("yields", "rows"), [("steps", 25), ("last_steps", 25), ("trajectories", 27), ("groups", 30)])
def test_total_steps_bounds_the_rows_and_what_is_in_flight_is_committed(yields: Any, rows: int, tmp_path: Path) -> None:
    closed = BytePolicy.closed
    collecting = collector(
        num_groups=None,
        total_steps=25,
        yields=yields,
        steps_per_batch=3,
        root=tmp_path,
        policy=partial(BytePolicy, name=yields),
    )
    assert sum(map(len, collecting)) == rows
    assert BytePolicy.closed == closed + 1, "the engine is free again"
    with pytest.raises(StopIteration):
        next(collecting)
    ends = list(tmp_path.glob("ends/*/*.json"))
    assert len(ends) == 1
    assert set(open_run(tmp_path).to_arrow()["step"].to_pylist()) == {0, 1, 2}
    assert [r.complete for r in open_run(tmp_path).group_records()] == [True] * len(open_run(tmp_path).group_records())


def test_total_steps_without_a_root_ends_at_once() -> None:
    closed = BytePolicy.closed
    collecting = collector(num_groups=None, total_steps=20, policy=partial(BytePolicy, name="bounded"))
    assert [len(batch) for batch in collecting] == [10, 10]
    assert BytePolicy.closed == closed + 1


@pytest.mark.parametrize("size", [5, 7])
def test_a_run_that_is_smaller_than_total_steps_ends_with_itself(size: int) -> None:
    assert sum(map(len, collector(total_steps=1000, steps_per_batch=size))) == 48


def test_lists_of_envs_and_policies_are_spread(tmp_path: Path) -> None:
    batches = list(
        collector(
            env=[(ENV, 3.0), partial(AsyncCountEnv, 1)],
            policy=[partial(BytePolicy, name="a"), partial(BytePolicy, name="b")],
            num_groups=32,
            root=tmp_path,
        )
    )
    whole = torch.cat(batches)
    columns = whole["collector", "group"].tolist(), whole["collector", "env"], whole["collector", "policy"]
    groups = set(zip(*columns, strict=True))
    envs = [env for _, env, _ in groups]
    assert (envs.count("CountEnv"), envs.count("AsyncCountEnv")) == (24, 8)
    assert {(group % 2, policy) for group, _, policy in groups} == {(0, "BytePolicy:a"), (1, "BytePolicy:b")}


def test_a_lambda_serves_without_a_root_and_is_refused_with_one(tmp_path: Path) -> None:
    assert sum(len(batch) for batch in collector(env=lambda: CountEnv(1))) == 16
    with pytest.raises(SpecError, match="define a class or function at the top of a module"):
        collector(env=lambda: CountEnv(1), root=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"steps_per_batch": 0}, SpecError, "steps_per_batch must be a positive number of rows; got 0"),
        ({"num_groups": 0}, SpecError, "num_groups"),
        ({"env": CountEnv()}, SpecError, "got an instance of CountEnv"),
        ({"env": partial(CountEnv, tuns=1)}, SpecError, "unexpected keyword argument 'tuns'"),
        ({"env": []}, SpecError, "envs"),
        ({"env": [(ENV, -1.0)]}, SpecError, "weight"),
        ({"env": [(ENV, 1.7e308), (CountEnv, 1.7e308)]}, SpecError, "finite sum"),
        ({"env": [(ENV, 1.0, 2.0)]}, SpecError, "a pair (constructor, weight); got 3 items"),
        ({"total_steps": 0}, SpecError, "total_steps must be a positive number of rows, or -1"),
        ({"yields": "frames"}, SpecError, "yields must be one of 'steps', 'trajectories', 'last_steps', 'groups'"),
        ({"limits": {"step_timeout_s": -1}}, SpecError, "limits.step_timeout_s: Input should be greater than 0"),
        ({"env": partial(FaultyEnv, "constructor")}, EnvError, "no dataset here"),
        ({"policy": "nowhere:Policy"}, SpecError, "cannot import 'nowhere:Policy'"),
        ({"num_shards": 1, "policy": [BytePolicy, partial(BytePolicy, 3)]}, SpecError, "num_shards"),
    ],
)
def test_a_bad_argument_is_one_line_before_anything_starts(
    change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        collector(**change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
