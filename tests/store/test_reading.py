"""Reading a run: filters, groups, datasets, tailing; and what is said of files that are not what they were."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcollect import StepBatch, fill, open_run, verify
from llmcollect.errors import CorruptFileError, StoreError
from llmcollect.run import RunSpec
from llmcollect.store import layout
from llmcollect.store.writer import ShardWriter
from llmcollect.types import Step, Trajectory
from tests.store.test_store import home, trajectory, writer_at
from tests.strategies import trajectories

SPEC = RunSpec.parse(
    {
        "envs": [{"target": "tests.fakes:CountEnv"}],
        "policies": [{"target": "tests.fakes:BytePolicy"}],
        "num_groups": 20,
        "group_size": 2,
        "num_shards": 2,
    }
)


def writers(root: Path, spec: RunSpec = SPEC) -> list[ShardWriter]:
    files, record = home(root, spec)
    return [ShardWriter(files, record, spec, shard) for shard in range(spec.num_shards)]


def fill_run(root: Path, commits: int = 5, turns: int = 3) -> None:
    """`commits` commits of four trajectories in each of two shards; each step's reward is the trajectory's number."""
    for shard, writer in enumerate(writers(root)):
        for commit in range(commits):
            groups = [2 * (2 * commit + place) + shard for place in range(2)]
            writer.append([made(group, sample, turns) for group in groups for sample in range(2)])
        writer.end()


def made(group: int, sample: int, turns: int = 3) -> Trajectory:
    number = 2 * group + sample
    steps = [
        Step(
            step=turn,
            prompt_ids=[1, number, turn],
            response_ids=[2] * (turn + 1),
            response_logprobs=[-0.5] * (turn + 1),
            policy_versions=[(number // 10, turn + 1)],
            messages="[]",
            response_text="x",
            reward=float(number),
            terminated=turn == turns - 1,
        )
        for turn in range(turns)
    ]
    return Trajectory(number, group, sample, "ab"[group % 2], group, "p", 0, "{}", steps)


runs_of_shard = st.integers(1, 8).flatmap(lambda n: st.tuples(*(trajectories(number) for number in range(n)))).map(list)


@given(
    data=runs_of_shard,
    cuts=st.sets(st.integers(1, 7)),
    env=st.sampled_from([None, "a", "b", ("a", "b"), "c"]),
    version=st.sampled_from([None, 0, (0, 4), (3, 9)]),
    least=st.none() | st.floats(-10, 10),
    completed=st.booleans(),
    include_failed=st.booleans(),
)
def test_filters_keep_exactly_the_trajectories_that_they_name(
    tmp_path_factory: pytest.TempPathFactory, data: list[Trajectory], cuts: set[int], **filters: Any
) -> None:
    filters["policy_version"], filters["min_reward"] = filters.pop("version"), filters.pop("least")
    root = tmp_path_factory.mktemp("run")
    writer = writer_at(root, SPEC.model_copy(update={"num_shards": 1}))
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in itertools.pairwise(edges):
        writer.append(data[start:end])

    def wanted(item: Trajectory) -> bool:
        versions = [version for step in item.steps for version, _ in step.policy_versions or ()]
        low, high = (
            (filters["policy_version"],) * 2
            if isinstance(filters["policy_version"], int)
            else (filters["policy_version"] or (0, 0))
        )
        rewards = [step.reward for step in item.steps if step.reward is not None]
        envs = filters["env"] if isinstance(filters["env"], tuple) else (filters["env"],)
        return (
            (filters["env"] is None or item.env in envs)
            and (filters["policy_version"] is None or (versions and all(low <= v <= high for v in versions)))
            and (filters["min_reward"] is None or (bool(rewards) and sum(rewards) >= filters["min_reward"]))
            and (not filters["completed"] or item.steps[-1].terminated)
            and (not item.failed or (filters["include_failed"] and not filters["completed"]))
        )

    expected = [item.trajectory for item in data if wanted(item)]
    run = open_run(root)
    assert list(dict.fromkeys(run.to_arrow(**filters)["trajectory"].to_pylist())) == expected
    assert [item.trajectory for item in run.trajectories(**filters)] == expected
    whole = {item.trajectory: len(item.steps) for item in data}
    assert Counter(run.to_arrow(**filters)["trajectory"].to_pylist()) == {n: whole[n] for n in expected}
    narrow = run.to_arrow(columns=["reward", "trajectory"], **filters)
    assert narrow.column_names == ["reward", "trajectory"]
    assert list(dict.fromkeys(narrow["trajectory"].to_pylist())) == expected
    assert [row for batch in run.steps(**filters) for row in batch.to_arrow()["step"].to_pylist()] == run.to_arrow(
        **filters
    )["step"].to_pylist()


def test_an_unknown_filter_or_column_is_named(tmp_path: Path) -> None:
    fill_run(tmp_path)
    run = open_run(tmp_path)
    with pytest.raises(TypeError, match=r"no filter 'min_rewards'; there are env, policy_version, min_reward"):
        list(run.steps(min_rewards=1))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"no column 'rewards'; the columns are run, shard"):
        run.to_arrow(columns=["rewards"])
    with pytest.raises(ValueError, match='"raise" or "skip"; got \'ignore\''):
        open_run(tmp_path, on_corrupt="ignore")  # type: ignore[arg-type]


def test_batches_of_some_columns_give_the_keys_that_these_make(tmp_path: Path) -> None:
    fill_run(tmp_path)
    run = open_run(tmp_path)
    whole = torch.cat([batch.to_tensordict() for batch in run.steps()])
    columns = ["prompt_ids", "response_ids", "response_logprobs", "reward"]
    part = torch.cat([batch.to_tensordict() for batch in run.steps(columns=columns)])
    assert ("tokens", "full") in part.keys(include_nested=True)
    assert ("text", "response") not in part.keys(include_nested=True)
    for key in part.keys(include_nested=True, leaves_only=True):
        assert (part[key] == whole[key]).all(), key


def test_groups_come_whole_and_in_the_order_of_their_completion(tmp_path: Path) -> None:
    first, second = writers(tmp_path)
    first.append([made(0, 0), made(2, 0)])
    second.append([made(1, 0), made(1, 1)])
    first.append([made(4, 0), made(2, 1)])
    failed = made(0, 1)
    failed.steps = [Step(step=-1, failure='{"message": "x"}')]
    first.append([failed])
    run = open_run(tmp_path)
    groups = [
        (record.group, record.arrived, record.failed, [m.sample for m in members]) for record, members in run.groups()
    ]
    assert groups == [(2, 2, 0, [0, 1]), (0, 1, 1, [0]), (1, 2, 0, [0, 1])]
    assert [(r.group, r.complete) for r, _ in run.groups(incomplete=True)] == [
        (2, True),
        (0, False),
        (1, True),
        (4, False),
    ]
    assert [record.group for record, _ in run.groups(env="b")] == [1]
    assert [len(members) for _, members in run.groups(include_failed=True)] == [2, 2, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_and_workers_share_the_rows_without_overlap_or_loss(tmp_path: Path, workers: int, shuffle: bool) -> None:
    fill_run(tmp_path)
    run = open_run(tmp_path)

    def epoch(number: int) -> list[list[tuple[int, int]]]:
        seen = []
        for rank in range(3):
            data = run.torch_dataset(4, shuffle=shuffle, seed=1, shuffle_buffer=16, rank=rank, world_size=3)
            data.set_epoch(number)
            seen.append([])
            for batch in data.loader(num_workers=workers):
                assert 0 < len(batch) <= 4
                for row in range(len(batch)):
                    trajectory, step = (int(batch["collector", key][row]) for key in ("traj_ids", "step"))
                    seen[-1].append((trajectory, step))
                    prompt = batch["tokens", "prompt"][row][: batch["tokens", "prompt_length"][row]].tolist()
                    assert (
                        prompt
                        == [i for turn in range(step + 1) for i in [1, trajectory, turn, *[2] * (turn + 1)]][
                            : len(prompt)
                        ]
                    ), "the whole context, whoever got the rows before it"
        return seen

    first = epoch(0)
    assert Counter(row for rows in first for row in rows) == Counter((t, s) for t in range(40) for s in range(3))
    assert all(first)
    assert epoch(0) == first
    assert (epoch(1) != first) == shuffle
    if not shuffle:
        assert first[0][:3] == [(0, 0), (0, 1), (0, 2)]


def test_sizes_and_ranks_that_cannot_be_are_refused(tmp_path: Path) -> None:
    fill_run(tmp_path)
    run = open_run(tmp_path)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        run.torch_dataset(0)
    with pytest.raises(ValueError, match="below world_size; got 2 of 2"):
        run.torch_dataset(1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="poll_seconds must be positive"):
        next(run.tail(poll_seconds=0))


def test_a_replay_buffer_is_filled(tmp_path: Path) -> None:
    fill_run(tmp_path)

    class Buffer(list[Any]):
        """Anything with extend."""

    buffer = Buffer()
    buffer.extend = lambda batch: buffer.append(batch)  # type: ignore[method-assign]
    assert fill(buffer, tmp_path, batch_size=7, env="a") == 60
    assert sum(len(batch) for batch in buffer) == 60
    assert set(torch.cat(buffer)["collector", "env"]) == {"a"}


def test_a_tail_sees_each_commit_once_and_ends(tmp_path: Path) -> None:
    both = writers(tmp_path)
    seen: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: seen.extend(
            batch.to_arrow()["trajectory"].to_pylist() for batch in open_run(tmp_path).tail(poll_seconds=0.01, env="a")
        )
    )
    thread.start()
    for group in range(6):
        both[group % 2].append([made(group, 0, 1), made(group, 1, 1)])
        time.sleep(0.02)
    assert thread.is_alive()
    for writer in both:
        writer.end()
    thread.join(20)
    assert not thread.is_alive()
    assert seen == [[0, 1], [4, 5], [8, 9]]


def test_the_pyarrow_dataset_holds_the_rows(tmp_path: Path) -> None:
    fill_run(tmp_path)
    data = open_run(tmp_path).dataset()
    assert data.count_rows() == 120
    assert data.to_table(columns=["trajectory"], filter=pc.field("env") == "a").num_rows == 60


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
) -> None:
    root = tmp_path_factory.mktemp("run")
    writer_at(root).append([trajectory(number, "some text " * 9) for number in range(6)])
    before = open_run(root).to_arrow()
    file = root / layout.commit_path(0, 0)
    raw = bytearray(file.read_bytes())
    raw[int(place * len(raw))] ^= 1 << bit
    file.write_bytes(raw)
    after = error = None
    try:
        after = open_run(root).to_arrow()
    except CorruptFileError as caught:
        error = str(caught)
    if error is None:
        assert after is not None
        assert after.equals(before)
    else:
        assert "steps/shard-00000/00000000.parquet" in error
        assert "\n" not in error
        assert verify(root).faults


def test_damaged_files_are_skipped_and_listed_if_asked_for(tmp_path: Path) -> None:
    fill_run(tmp_path)
    flip(tmp_path / layout.commit_path(0, 1), 300)
    (tmp_path / layout.commit_path(1, 2)).write_bytes(b"PAR1")
    (tmp_path / layout.commit_path(1, 0)).unlink()
    with pytest.raises(CorruptFileError, match=r"shard-00001/00000000\.parquet is missing, and a later commit"):
        open_run(tmp_path).to_arrow()
    run = open_run(tmp_path, on_corrupt="skip")
    assert run.to_arrow().num_rows == 120 - 3 * 12
    assert set(run.corrupt) == {layout.commit_path(0, 1), layout.commit_path(1, 2), layout.commit_path(1, 0)}
    assert {fault.path for fault in verify(tmp_path).faults} >= set(run.corrupt)


def flip(file: Path, place: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 0x10
    file.write_bytes(raw)


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def foreign(root: Path) -> None:
    pq.write_table(open_run(root).to_arrow(), root / "steps/shard-00000/mine.parquet")


def foreign_in_a_commits_place(root: Path) -> None:
    pq.write_table(open_run(root).to_arrow(), root / layout.commit_path(0, 5))


def of_another_run(root: Path) -> None:
    other = root.parent / "other"
    fill_run(other)
    (root / layout.commit_path(0, 4)).write_bytes((other / layout.commit_path(0, 4)).read_bytes())


def of_another_place(root: Path) -> None:
    (root / layout.commit_path(0, 5)).write_bytes((root / layout.commit_path(0, 0)).read_bytes())


def gap(root: Path) -> None:
    (root / layout.commit_path(0, 2)).unlink()


def no_json(root: Path) -> None:
    (root / "run.json").write_text("no json")


def other_format(root: Path) -> None:
    record = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps(record | {"format": 99}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (foreign, r"steps/shard-00000/mine\.parquet is no file of a run of llmcollect: move it elsewhere"),
        (foreign_in_a_commits_place, r"00000005\.parquet has no readable footer: it is no commit of llmcollect"),
        (of_another_run, r"00000004\.parquet is another commit's file: number 4 of shard 0 of run"),
        (of_another_place, r"00000005\.parquet is another commit's file: number 0 of shard 0"),
        (gap, r"00000002\.parquet is missing, and a later commit of its shard is there: bring it back"),
        (no_json, r"run\.json is damaged"),
        (other_format, r"has format 99, and this version of llmcollect reads up to 1: update llmcollect"),
    ],
)
def test_what_is_not_as_it_must_be_is_one_line_and_nothing_is_touched(
    tmp_path: Path, damage: Callable[[Path], None], match: str
) -> None:
    root = tmp_path / "run"
    fill_run(root)
    damage(root)
    before = snapshot(root)
    for call in (lambda: open_run(root).to_arrow(), lambda: writers(root)[0].catch_up()):
        with pytest.raises(StoreError, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
    if damage in (no_json, other_format):
        with pytest.raises(StoreError, match=match):
            verify(root)
    else:
        assert not verify(root).ok
    assert snapshot(root) == before


def test_verify_finds_what_a_writer_would_never_write(tmp_path: Path) -> None:
    fill_run(tmp_path)
    assert verify(tmp_path).complete
    report = verify(tmp_path)
    assert (report.trajectories, report.planned, report.commits, report.rows) == (40, 40, 10, 120)


def test_a_torn_temporary_file_harms_nobody(tmp_path: Path) -> None:
    fill_run(tmp_path)
    (tmp_path / ".tmp" / "torn").write_bytes(b"PAR1 half")
    report = verify(tmp_path)
    assert report.ok
    assert report.leftover == 1
    assert open_run(tmp_path).to_arrow().num_rows == 120


def test_a_batch_kept_compact_holds_its_contexts_alone(tmp_path: Path) -> None:
    fill_run(tmp_path)
    whole = StepBatch.concat(list(open_run(tmp_path).steps()))
    few = whole[[5, 50, 3]].compact()
    for key in (("tokens", "full"), ("log_probs", "full"), ("collector", "traj_ids")):
        assert (few.to_tensordict()[key] == whole[[5, 50, 3]].to_tensordict()[key]).all()
