"""A StepBatch and its TensorDict hold the same rows, whatever is done to them."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcollect import StepBatch, StepTensorDict
from llmcollect.batch import trajectories_to_table
from llmcollect.types import Step, Trajectory
from tests.strategies import runs


def table_of(trajectories: list[Trajectory]) -> pa.Table:
    return trajectories_to_table(trajectories, run="r", shard=1, writer="w")


def plain(table: pa.Table) -> str:
    return repr(table.to_pylist())  # a text, as NaN is not equal to itself


def assert_same(left: StepTensorDict, right: StepTensorDict) -> None:
    assert left.batch_size == right.batch_size
    keys = set(left.keys(include_nested=True, leaves_only=True))
    assert keys == set(right.keys(include_nested=True, leaves_only=True))
    for key in keys:
        a, b = left[key], right[key]
        if isinstance(a, torch.Tensor):
            assert torch.equal(torch.nan_to_num(a, -7.0), torch.nan_to_num(b, -7.0)), key
        else:
            assert list(a) == list(b), key


def contexts(trajectories: list[Trajectory]) -> list[list[int]]:
    """What the policy saw before each step, spelled out."""
    seen = []
    for trajectory in trajectories:
        context: list[int] = []
        for step in trajectory.steps:
            context = [] if step.context_reset else context
            context = [*context, *(step.prompt_ids or ())]
            seen.append(context)
            context = [*context, *(step.response_ids or ())]
    return seen


def own(values: torch.Tensor, length: torch.Tensor) -> list[Any]:
    return values[: int(length)].tolist()


@given(runs)
def test_the_tensordict_holds_contexts_masks_and_logprobs(trajectories: list[Trajectory]) -> None:
    batch = StepBatch(table_of(trajectories)).to_tensordict()
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    for row, step, context in zip(batch.unbind(0), steps, contexts(trajectories), strict=True):
        tokens, response = row["tokens"], list(step.response_ids or ())
        assert own(tokens["prompt"], tokens["prompt_length"]) == context
        assert own(tokens["response"], tokens["response_length"]) == response
        total = tokens["prompt_length"] + tokens["response_length"]
        assert own(tokens["full"], total) == context + response
        assert int(row["masks", "all_attention_mask"].sum()) == total
        assert tokens["full"][row["masks", "all_assistant_mask"]].tolist() == response
        sampled = row["log_probs", "full"][row["masks", "all_assistant_mask"]]
        if step.response_logprobs is None:
            assert bool(sampled.isnan().all())
        else:
            assert sampled.tolist() == step.response_logprobs
        assert own(tokens["policy_version"], tokens["response_length"]) == [
            version for version, count in step.policy_versions or () for _ in range(count)
        ]


@given(runs)
def test_a_tensordict_goes_back_to_the_same_rows(trajectories: list[Trajectory]) -> None:
    table = table_of(trajectories)
    back = StepBatch.from_tensordict(StepBatch(table).to_tensordict())
    assert plain(back.to_arrow()) == plain(table)


@given(runs, st.data())
def test_rows_keep_their_contexts_in_any_order(trajectories: list[Trajectory], data: st.DataObject) -> None:
    whole = StepBatch(table_of(trajectories))
    order = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=8))
    expected = whole.to_tensordict()[torch.tensor(order, dtype=torch.long)]
    picked = whole[order].to_tensordict()
    for mine, theirs in zip(picked.unbind(0), expected.unbind(0), strict=True):
        length = int(mine["tokens", "prompt_length"])
        assert length == int(theirs["tokens", "prompt_length"])
        assert torch.equal(mine["tokens", "prompt"][:length], theirs["tokens", "prompt"][:length])
    again = StepBatch.from_tensordict(expected)
    assert plain(again.to_arrow()) == plain(whole[order].to_arrow())
    assert whole[0:0].to_tensordict().batch_size == (0,)
    assert contexts_of(again.to_tensordict()) == contexts_of(expected)


def contexts_of(batch: StepTensorDict) -> list[list[int]]:
    return [own(row["tokens", "prompt"], row["tokens", "prompt_length"]) for row in batch.unbind(0)]


@given(runs, st.integers(1, 7))
def test_split_and_concat_are_inverse(trajectories: list[Trajectory], size: int) -> None:
    whole = StepBatch(table_of(trajectories))
    pieces = list(whole.split(size))
    assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    joined = StepBatch.concat(pieces)
    assert plain(joined.to_arrow()) == plain(whole.to_arrow())
    assert_same(joined.to_tensordict(), whole.to_tensordict())


@given(runs, st.integers(1, 7))
def test_tensordicts_of_different_widths_can_be_concatenated(trajectories: list[Trajectory], size: int) -> None:
    whole = StepBatch(table_of(trajectories))
    pieces = [piece.to_tensordict() for piece in whole.split(size)]
    joined = torch.cat(pieces)
    assert isinstance(joined, StepTensorDict)
    assert_same(joined, whole.to_tensordict())


@given(runs)
def test_failed_trajectories_can_be_left_out(trajectories: list[Trajectory]) -> None:
    kept = StepBatch(table_of(trajectories)).without_failed().to_arrow()
    expected = [t.trajectory for t in trajectories if not t.failed for _ in t.steps]
    assert kept["trajectory"].to_pylist() == expected


@pytest.fixture
def batch() -> StepTensorDict:
    def trajectory(number: int, turns: int) -> Trajectory:
        steps = [
            Step(
                step=k,
                prompt_ids=[k + 1] * (number + 1),
                response_ids=[9] * k,
                response_logprobs=[-0.5] * k,
                policy_versions=[(0, k)] if k else [],
                reward=float(k),
                terminated=k == turns - 1,
                generated_at=1,
            )
            for k in range(turns)
        ]
        return Trajectory(number, number, 0, "e", 0, "p", 0, "{}", steps)

    return StepBatch(table_of([trajectory(0, 3), trajectory(1, 2)])).to_tensordict()


def test_what_a_training_loop_does_to_a_batch(batch: StepTensorDict) -> None:
    assert batch.batch_size == (5,)
    assert batch[1]["tokens", "prompt_length"] == 2
    assert batch[1:3].batch_size == (2,)
    assert batch[torch.tensor([4, 0])]["collector", "traj_ids"].tolist() == [1, 0]
    assert batch[batch["next", "done"].squeeze(-1)]["collector", "step"].tolist() == [2, 1]
    assert [len(piece) for piece in batch.split(2)] == [2, 2, 1]
    assert [len(piece) for piece in batch.chunk(2)] == [3, 2]
    assert len(batch.unbind(0)) == 5
    assert_same(torch.stack(batch.unbind(0)), batch)
    assert_same(torch.cat([batch[:2], batch[2:]]), batch)
    shuffled = batch[torch.randperm(5, generator=torch.Generator().manual_seed(0))]
    assert sorted(shuffled["next", "reward"].flatten().tolist()) == sorted(batch["next", "reward"].flatten().tolist())
    assert batch.to("meta")["tokens", "full"].device.type == "meta"
    assert batch.to(torch.device("cpu")).clone().contiguous()["text", "task"][0] == "{}"
    assert isinstance(batch[1:3].to("cpu"), StepTensorDict)
    batch["next", "reward"].zero_()  # it may be written to
    assert batch["next", "reward"].sum() == 0


def test_delta_context_holds_what_was_new(batch: StepTensorDict) -> None:
    delta = StepBatch.from_tensordict(batch).to_tensordict(context="delta")
    assert delta["tokens", "prompt_length"].tolist() == [1, 1, 1, 2, 2]
    assert batch["tokens", "prompt_length"].tolist() == [1, 2, 4, 2, 4]


def test_an_empty_batch_converts() -> None:
    empty = StepBatch.concat([]).to_tensordict()
    assert empty.batch_size == (0,)


@pytest.mark.parametrize(
    "step",
    [
        Step(step=0, response_ids=[1, 2], response_logprobs=[0.0], policy_versions=[(0, 2)]),
        Step(step=0, response_ids=[1, 2], response_logprobs=None, policy_versions=[(0, 1)]),
    ],
)
def test_rows_whose_lengths_differ_are_refused(step: Step) -> None:
    with pytest.raises(ValueError, match="trajectory 7, step 0"):
        table_of([Trajectory(7, 7, 0, "e", 0, "p", 0, "{}", [step])])


def test_rows_count_from_the_end_as_well_and_must_be_there(batch: StepTensorDict) -> None:
    table = StepBatch.from_tensordict(batch).to_arrow()
    assert contexts_of(StepBatch(table, np.array([-3, -5])).to_tensordict()) == [[1, 2, 9, 3], [1]]
    for missing in (5, -6):
        with pytest.raises(IndexError):
            StepBatch(table, np.array([missing]))


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 1, 3, 2**31 - 1])
def test_a_file_that_lies_about_lengths_touches_no_other_row(batch: StepTensorDict, count: int) -> None:
    table = StepBatch.from_tensordict(batch).to_arrow()
    runs, logprobs = table["policy_versions"].to_pylist(), table["response_logprobs"].to_pylist()
    runs[2] = [{"version": 7, "count": count}, {"version": 8, "count": count}]
    logprobs[2] = [-1.0] * 5
    for name, values in (("policy_versions", runs), ("response_logprobs", logprobs)):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    found = StepBatch(table).to_tensordict()
    others = [0, 1, 3, 4]
    for key in (("tokens", "policy_version"), ("log_probs", "response"), ("log_probs", "full")):
        assert torch.equal(found[key][others], batch[key][others]), key
    assert set(found["tokens", "policy_version"][2].tolist()) <= {-1, 7, 8}
    assert bool(found["log_probs", "response"][2].isnan().all())
    assert torch.equal(found["tokens", "full"], batch["tokens", "full"])


def test_a_batch_of_several_can_be_sent_on(batch: StepTensorDict) -> None:
    whole = StepBatch.from_tensordict(batch)
    for part in (parts := list(whole.split(2))):
        expected = part.to_tensordict()
        for sent in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
            assert_same(sent.to_tensordict(), expected)
    assert [len(part) for part in parts] == [2, 2, 1]


def test_rows_that_came_by_way_of_other_types_convert(batch: StepTensorDict) -> None:
    table = StepBatch.from_tensordict(batch).to_arrow()
    wide = {
        "prompt_ids": pa.large_list(pa.int64()),
        "response_ids": pa.list_(pa.int64()),
        "response_logprobs": pa.list_(pa.float64()),
        "policy_versions": pa.list_(pa.struct([("version", pa.int32()), ("count", pa.int64())])),
    }
    for name, kind in wide.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, pa.field(name, kind), table[name].cast(kind))
    assert_same(StepBatch(table).to_tensordict(), batch)


PAD = """
import numpy
from llmcollect.padding import pad_versions
out = numpy.empty((1, 3), int)
pad_versions(*map(numpy.array, ([0], [0, 1], [5])), numpy.array([2], "int32"), numpy.array([2]), out)
print(out.tolist())
"""


@pytest.mark.parametrize("fault", ["no place", "torn files"])
def test_the_compiled_loops_do_not_need_their_cache(fault: str, tmp_path: Path) -> None:
    def padded(**environment: str) -> str:
        told = os.environ | environment
        done = subprocess.run([sys.executable, "-c", PAD], env=told, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if fault == "no place":
        # Of the places that numba tries it may use the one that the user names, and none is named.
        assert padded(NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator", NUMBA_CACHE_DIR="") == "[[5, 5, -1]]"
        return
    assert padded(NUMBA_CACHE_DIR=str(tmp_path)) == "[[5, 5, -1]]"
    kept = [path for path in tmp_path.rglob("*.nb?") if path.is_file()]
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:1])
    assert padded(NUMBA_CACHE_DIR=str(tmp_path)) == "[[5, 5, -1]]"
