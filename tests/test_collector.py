"""The facade: batches of the right size, each row once, live rows equal to stored ones."""

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
