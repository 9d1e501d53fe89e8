"""The spec says what is wrong in one line, and the plan is a pure function of it."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.errors import SpecError
from llmcollect.run import RunSpec, derive_seed, plan_groups

ENV = {"target": "tests.fakes:CountEnv"}
POLICY = {"target": "tests.fakes:BytePolicy"}


def spec(**changes: object) -> RunSpec:
    return RunSpec.parse({"envs": [ENV], "policies": [POLICY], "num_groups": 8, **changes})


specs = st.builds(
    lambda weights, groups, size, shards, seed: RunSpec(
        envs=tuple(EnvSpec(target="m:E", name=f"e{i}", weight=w) for i, w in enumerate(weights)),
        policies=(ComponentSpec(target="m:P"),),
        num_groups=groups,
        group_size=size,
        num_shards=shards,
        seed=seed,
    ),
    st.lists(st.floats(0.05, 20), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(-(2**40), 2**40),
)


@given(specs)
def test_every_trajectory_is_planned_once_and_in_its_shard(run: RunSpec) -> None:
    whole = list(plan_groups(run))
    by_shard = [group for shard in range(run.num_shards) for group in plan_groups(run, shard)]
    assert sorted(by_shard, key=lambda group: group.group) == whole
    numbers = [plan.trajectory for group in whole for plan in group.trajectories]
    assert numbers == list(range(run.num_groups * run.group_size))
    assert all(group.shard == group.group % run.num_shards for group in whole)
    assert [run.groups_in_shard(s) for s in range(run.num_shards)] == [
        sum(group.shard == s for group in whole) for s in range(run.num_shards)
    ]


@given(specs, st.integers(1, 30))
def test_growing_a_run_leaves_its_groups_as_they_were(run: RunSpec, more: int) -> None:
    larger = run.model_copy(update={"num_groups": run.num_groups + more})
    assert list(islice(plan_groups(larger), run.num_groups)) == list(plan_groups(run))


@given(specs)
def test_each_env_walks_its_tasks_in_order(run: RunSpec) -> None:
    for env in range(len(run.envs)):
        indices = [g.trajectories[0].task.index for g in plan_groups(run) if g.trajectories[0].env == env]
        assert indices == list(range(len(indices)))


@given(specs)
def test_members_of_a_group_share_the_task_and_no_seed(run: RunSpec) -> None:
    for group in plan_groups(run):
        assert len({plan.task for plan in group.trajectories}) == 1
        for step in range(3):
            seeds = [plan.step_seed(step) for plan in group.trajectories]
            assert len(set(seeds)) == len(seeds)
            assert all(0 <= seed < 2**32 for seed in seeds)


def test_shares_follow_the_weights() -> None:
    run = spec(envs=[{**ENV, "weight": 3.0}, {**ENV, "weight": 1.0, "name": "b"}], num_groups=4000)
    counts = Counter(group.trajectories[0].env for group in plan_groups(run))
    assert counts == {0: 3000, 1: 1000}


def test_env_and_shard_are_not_confounded() -> None:
    run = spec(envs=[ENV, {**ENV, "name": "b"}], num_groups=4000, num_shards=2)
    counts = Counter((group.shard, group.trajectories[0].env) for group in plan_groups(run))
    assert all(900 < count < 1100 for count in counts.values())
    assert len(counts) == 4


def test_seeds_never_change() -> None:
    """A stored run must resume under a later version: these numbers are part of the format."""
    assert derive_seed(0, "task", "e", 0) == 1190466725
    plan = next(plan_groups(spec(group_size=2))).trajectories[1]
    assert (plan.task.seed, plan.seed, plan.step_seed(1)) == (40180646, 1774620209, 896395570)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_groups": 0}, ["num_groups", "greater than or equal to 1", "got 0"]),
        ({"nun_groups": 3}, ["nun_groups", "Extra inputs are not permitted"]),
        ({"limits": {"step_timeout_s": -1}}, ["limits.step_timeout_s", "greater than 0", "got -1"]),
        ({"limits": {"max_open_trajectories": 2}, "group_size": 4}, ["max_open_trajectories", "group of 4", "got 2"]),
        ({"sampling": {"temperature": 9}}, ["sampling.temperature", "less than or equal to 2"]),
        ({"envs": [{**ENV, "weight": 0}]}, ["envs.0.weight", "greater than 0"]),
        ({"envs": []}, ["envs", "at least 1"]),
        ({"envs": [{"target": "no colon"}]}, ["envs.0.target", "package.module:Name", "no colon"]),
        ({"policies": [POLICY] * 3}, ["num_shards", "at least the number of policies"]),
        ({"envs": [{**ENV, "kwargs": {"api_key": "sk-1"}}]}, ["api_key", "environment variable"]),
    ],
)
def test_a_bad_spec_is_one_clear_line(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**change)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_secret_is_not_repeated_in_its_error() -> None:
    with pytest.raises(SpecError) as caught:
        spec(envs=[{**ENV, "kwargs": {"api_key": "sk-very-secret"}}])
    assert "sk-very-secret" not in str(caught.value)


def test_a_spec_survives_json() -> None:
    run = spec(sampling={"stop": ["\n"], "temperature": 0.5}, limits={"max_turns": 3})
    assert RunSpec.parse(run.model_dump(mode="json")) == run
