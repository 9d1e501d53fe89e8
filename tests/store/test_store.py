"""Commits appear whole, once, whoever else writes; what is read is what was written."""

import json
import os
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcollect import open_run
from llmcollect.errors import CorruptFileError, RunMismatchError, SpecError, StoreError
from llmcollect.run import RunSpec
from llmcollect.schema import COLUMN_DOCS, STEP_SCHEMA
from llmcollect.store import layout
from llmcollect.store.files import LocalFiles, open_files
from llmcollect.store.record import RunRecord, create_or_check_run
from llmcollect.store.writer import ShardWriter
from llmcollect.types import Step, Trajectory
from tests.strategies import runs

SPEC = RunSpec.parse(
    {
        "envs": [{"target": "tests.fakes:CountEnv"}],
        "policies": [{"target": "tests.fakes:BytePolicy"}],
        "num_groups": 40,
    }
)


def home(root: Path, spec: RunSpec = SPEC) -> tuple[LocalFiles, RunRecord]:
    files = LocalFiles(root)
    return files, create_or_check_run(files, spec, ("m",))


def writer_at(root: Path, spec: RunSpec = SPEC, shard: int = 0) -> ShardWriter:
    return ShardWriter(*home(root, spec), spec, shard)


def trajectory(number: int, text: str = "x") -> Trajectory:
    step = Step(
        step=0,
        prompt_ids=[1, number],
        response_ids=[2, 3],
        response_logprobs=[-0.1, -0.2],
        policy_versions=[(0, 2)],
        response_text=text,
        reward=1.0,
        terminated=True,
        generated_at=1,
    )
    return Trajectory(number, number, 0, "e", 0, "p", 0, "{}", [step])


@given(data=runs)
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: list[Trajectory]) -> None:
    root = tmp_path_factory.mktemp("run")
    table = writer_at(root).append(data)
    run = open_run(root)
    assert table is not None
    assert repr(run.to_arrow(include_failed=True).to_pylist()) == repr(table.to_pylist())
    read = list(run.trajectories(include_failed=True))
    assert [item.trajectory for item in read] == [item.trajectory for item in data]
    for item, original in zip(read, data, strict=True):
        ids = [i for context in item.contexts for i in context.token_ids.tolist()]
        assert ids == [i for s in original.steps for i in [*(s.prompt_ids or ()), *(s.response_ids or ())]]
        sampled = [i for c in item.contexts for i in c.token_ids[c.loss_mask].tolist()]
        assert sampled == [i for s in original.steps for i in s.response_ids or ()]
        assert (item.failure is not None) == original.failed


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), min_size=1, max_size=10), st.data())
def test_the_first_commit_of_a_trajectory_wins(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], data: st.DataObject
) -> None:
    """Three writers, none of which looks before it appends, in any order."""
    root = tmp_path_factory.mktemp("run")
    writers = [writer_at(root) for _ in range(3)]
    first: dict[int, str] = {}
    for batch in batches:
        writer = data.draw(st.sampled_from(writers))
        won = writer.append([trajectory(number) for number in batch])
        new = [number for number in batch if number not in first]
        first |= dict.fromkeys(new, writer.writer)
        assert (won["trajectory"].to_pylist() if won else []) == new
    table = open_run(root).to_arrow()
    rows = zip(table["trajectory"].to_pylist(), table["writer"].to_pylist(), strict=True)
    assert list(rows) == list(first.items())


def test_many_writers_at_once_store_each_trajectory_once(tmp_path: Path) -> None:
    home(tmp_path)
    barrier = threading.Barrier(6)

    def write() -> None:
        writer = writer_at(tmp_path)
        barrier.wait()
        for start in range(0, 40, 4):
            writer.append([trajectory(number) for number in range(start, start + 4)])
        writer.end()

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(open_run(tmp_path).to_arrow()["trajectory"].to_pylist()) == list(range(40))
    ends = list(tmp_path.glob("ends/**/*.json"))
    assert len(ends) == 1
    assert json.loads(ends[0].read_text())["trajectories"] == 40
    assert not list((tmp_path / ".tmp").iterdir())


class LostAnswers(LocalFiles):
    """Puts that succeed and are answered as if the name had been taken: what a resent request looks like."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return super().put_if_absent(path, data) and "steps/" not in path


def test_a_lost_answer_is_recognised_as_ones_own_commit(tmp_path: Path) -> None:
    files, record = home(tmp_path)
    writer = ShardWriter(LostAnswers(tmp_path), record, SPEC, 0)
    for number in range(3):
        won = writer.append([trajectory(number)])
        assert won is not None
        assert won["trajectory"].to_pylist() == [number]
    assert open_run(tmp_path).to_arrow()["trajectory"].to_pylist() == [0, 1, 2]
    assert files.read(layout.commit_path(0, 2)) is not None
    assert files.read(layout.commit_path(0, 3)) is None


def test_a_writer_catches_up(tmp_path: Path) -> None:
    writer_at(tmp_path).append([trajectory(1), trajectory(2)])
    later = writer_at(tmp_path)
    later.catch_up()
    assert later.done == {1, 2}
    assert later.append([trajectory(1)]) is None


def test_files_follow_the_layout_and_carry_their_record(tmp_path: Path) -> None:
    writer = writer_at(tmp_path)
    writer.append([trajectory(0), trajectory(5)])
    writer.end()
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["ends/shard-00000/00000001.json", "run.json", "steps/shard-00000/00000000.parquet"]
    commit = pq.read_metadata(tmp_path / names[2])
    record = json.loads(commit.metadata[b"llmcollect.commit"])
    assert record["trajectories"] == [0, 5]
    assert (record["rows"], record["tokens"], record["num_groups"]) == (2, 4, 40)
    assert commit.row_group(0).column(0).compression == "ZSTD"
    assert commit.row_group(0).column(2).has_offset_index


def test_the_stored_schema_is_the_documented_one(tmp_path: Path) -> None:
    writer_at(tmp_path).append([trajectory(0)])
    stored = pq.read_schema(tmp_path / layout.commit_path(0, 0)).remove_metadata()
    assert stored.equals(STEP_SCHEMA)
    assert set(COLUMN_DOCS) == set(STEP_SCHEMA.names)


def test_a_root_names_one_run(tmp_path: Path) -> None:
    first = home(tmp_path)[1]
    assert home(tmp_path)[1].run == first.run
    other = SPEC.model_copy(update={"seed": 7, "group_size": 2})
    with pytest.raises(RunMismatchError, match=r"seed \(stored 0, asked for 7\)") as caught:
        home(tmp_path, other)
    assert "group_size (stored 1, asked for 2)" in str(caught.value)
    assert caught.value.exit_code == 2


def test_limits_may_change_and_num_groups_may_only_grow(tmp_path: Path) -> None:
    home(tmp_path)
    limits = SPEC.limits.model_copy(update={"concurrency": 3})
    larger = SPEC.model_copy(update={"num_groups": 50, "limits": limits})
    writer_at(tmp_path, larger).append([trajectory(45)])
    assert open_run(tmp_path).num_groups == 50
    with pytest.raises(RunMismatchError, match="may only grow"):
        home(tmp_path, SPEC.model_copy(update={"num_groups": 39}))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_commit_is_named_and_not_read(tmp_path: Path, damage: str) -> None:
    writer_at(tmp_path).append([trajectory(number, "some text " * 50) for number in range(20)])
    file = tmp_path / layout.commit_path(0, 0)
    data = bytearray(file.read_bytes())
    match damage:
        case "truncate":
            del data[len(data) // 2 :]
        case "flip":
            data[200] ^= 0xFF
        case "empty":
            data.clear()
    file.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"shard-00000/00000000\.parquet"):
        list(open_run(tmp_path).steps())


def test_a_folder_without_a_run_and_a_newer_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        open_run(tmp_path)
    home(tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(StoreError, match=r"has format 99.*update llmcollect"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"run\.json is damaged"):
        open_run(tmp_path)


def test_reading_imports_nothing_that_a_run_names(tmp_path: Path) -> None:
    """A hostile run.json: its target would leave a mark if it were imported."""
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    root = tmp_path / "run"
    files, record = home(root)
    spec = json.loads(json.dumps(record.spec).replace("tests.fakes:CountEnv", "evil_module:Env"))
    (root / "run.json").write_text(record.model_copy(update={"spec": spec}).model_dump_json())
    ShardWriter(files, record, SPEC, 0).append([trajectory(0)])
    old = os.getcwd()
    os.chdir(tmp_path)
    try:
        run = open_run(root)
        assert run.to_arrow().num_rows == 1
        assert len(list(run.trajectories())) == 1
    finally:
        os.chdir(old)
    assert not (tmp_path / "mark").exists()


def test_a_root_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot read .*Not a directory"):
        home(tmp_path / "file" / "run")


def test_a_root_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SpecError, match="local folders and s3:"):
        open_files("gopher://host/run")


def test_duckdb_polars_and_pandas_read_the_files_as_they_are(tmp_path: Path) -> None:
    import duckdb
    import polars

    spec = SPEC.model_copy(update={"num_shards": 2})
    for shard in range(2):
        writer_at(tmp_path, spec, shard).append([trajectory(shard), trajectory(shard + 2)])
    pattern = f"{tmp_path}/steps/**/*.parquet"
    rows = duckdb.sql(f"select trajectory, shard, response_ids, started_at from '{pattern}' order by 1").fetchall()
    assert [row[:3] for row in rows] == [(0, 0, [2, 3]), (1, 1, [2, 3]), (2, 0, [2, 3]), (3, 1, [2, 3])]
    frame = polars.read_parquet(pattern)
    assert frame.sort("trajectory")["prompt_ids"].to_list() == [[1, 0], [1, 1], [1, 2], [1, 3]]
    run = open_run(tmp_path)
    assert run.to_pandas()["trajectory"].tolist() == [0, 2, 1, 3]
