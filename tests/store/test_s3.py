"""The store on a real S3 server: one winner a name, few requests, no multipart upload, and faults of the network."""

import logging
import threading
from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from llmcollect import Limits, LLMCollector, open_run, verify
from llmcollect.errors import SpecError, StoreError
from llmcollect.run import RunSpec
from llmcollect.store import layout
from llmcollect.store.files import Files, open_files
from llmcollect.store.record import create_or_check_run
from llmcollect.store.writer import ShardWriter
from tests.fakes import BytePolicy, CountEnv
from tests.servers import s3
from tests.servers.ceph import SECRET_KEY, STRANGER
from tests.servers.proxy import Fault, Proxy
from tests.store.test_store import SPEC, trajectory

pytestmark = pytest.mark.server
needs_users = pytest.mark.skipif(not s3.IS_CEPH, reason="moto knows no users")


def writer_at(root: str, spec: RunSpec = SPEC) -> ShardWriter:
    files = open_files(root)
    return ShardWriter(files, create_or_check_run(files, spec, ("m",)), spec, 0)


def test_files(bucket: str) -> None:
    files = open_files(f"{bucket}/a/run")
    assert files.read("x") is None
    assert files.sizes("steps") == {}
    assert files.put_if_absent("steps/x", b"123456")
    assert not files.put_if_absent("steps/x", b"other")
    assert files.put_if_absent("empty", b"")
    assert files.read("steps/x") == b"123456"
    assert files.read("empty") == b""
    assert files.read_many(["steps/x", "nothing", "steps/x"], last=2) == [b"56", None, b"56"]
    assert files.read_many(["steps/x"], last=100) == [b"123456"]
    assert files.sizes("steps") == {"steps/x": 6}
    with files.open("steps/x") as file:
        file.seek(2)
        assert file.read(2) == b"34"
    with pytest.raises(FileNotFoundError):
        files.open("nothing")


def test_a_name_has_one_winner_among_racing_writers(bucket: str) -> None:
    wins: list[tuple[int, int]] = []

    def race(me: int, files: Files, start: threading.Barrier) -> None:
        start.wait()
        for name in range(50):
            if files.put_if_absent(f"{name}", bytes([me])):
                wins.append((name, me))

    start = threading.Barrier(8)
    threads = [threading.Thread(target=race, args=(me, open_files(bucket), start)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in wins) == list(range(50))
    files = open_files(bucket)
    assert all(files.read(f"{name}") == bytes([me]) for name, me in wins)


def test_a_large_commit_is_one_put(bucket: str, proxy: Proxy) -> None:
    """Above 50 MB s3fs would upload in parts, and there are servers that let the completion overwrite."""
    files = open_files(bucket)
    large = bytes(120 << 20)
    assert files.put_if_absent("large", large)
    assert not files.put_if_absent("large", large)
    assert [(request.method, request.query, request.status) for request in proxy.requests] == [
        ("PUT", "", 200),
        ("PUT", "", 412),
    ]


def test_a_run_on_s3_is_collected_read_and_resumed(bucket: str, proxy: Proxy) -> None:
    root = f"{bucket}/deep/run"
    arguments: dict[str, Any] = {"env": CountEnv, "policy": BytePolicy, "steps_per_batch": 5, "group_size": 2}
    arguments |= {"num_shards": 2, "limits": Limits(commit_rows=8), "root": root}
    live = [row for batch in LLMCollector(**arguments, num_groups=6) for row in batch["collector", "traj_ids"].tolist()]
    assert sorted(live) == sorted([*range(12)] * 2)
    assert list(LLMCollector(**arguments, num_groups=6)) == []
    more = [row for batch in LLMCollector(**arguments, num_groups=8) for row in batch["collector", "traj_ids"].tolist()]
    assert sorted(more) == sorted([*range(12, 16)] * 2)
    run = open_run(root)
    assert sorted(run.to_arrow()["trajectory"].to_pylist()) == sorted([*range(16)] * 2)
    assert [len(members) for _, members in run.groups()] == [2] * 8
    assert run.dataset().count_rows() == 32
    assert run.to_arrow(columns=["reward"], min_reward=0.5).num_rows < 32
    assert verify(root).complete
    assert not [request for request in proxy.requests if "upload" in request.query], "no commit in parts"
    assert all(request.method in ("GET", "HEAD", "PUT") for request in proxy.requests), "nothing is deleted"


def test_a_resume_takes_one_listing_and_a_request_a_footer(bucket: str, proxy: Proxy) -> None:
    first = writer_at(f"{bucket}/run")
    for number in range(30):
        first.append([trajectory(number)])
    proxy.requests.clear()
    later = writer_at(f"{bucket}/run")
    later.catch_up()
    assert len(later.done) == 30
    assert proxy.counts() == {"LIST": 1, "GET": 30 + 2}, "and run.json, to look and to compare"
    proxy.requests.clear()
    assert later.append([trajectory(30)]) is not None
    assert proxy.counts() == {"PUT": 1}


def test_a_zombie_catches_up_without_a_put_for_each_commit(bucket: str, proxy: Proxy) -> None:
    zombie, other = writer_at(f"{bucket}/run"), writer_at(f"{bucket}/run")
    for number in range(40):
        other.append([trajectory(number)])
    proxy.requests.clear()
    won = zombie.append([trajectory(7), trajectory(99)])
    assert won is not None
    assert won["trajectory"].to_pylist() == [99]
    assert proxy.counts()["PUT"] == 2


def test_filters_leave_commits_unread(bucket: str, proxy: Proxy) -> None:
    writer = writer_at(f"{bucket}/run")
    for number in range(10):
        item = trajectory(number)
        item.steps[0].reward = float(number)
        writer.append([item])
    run = open_run(f"{bucket}/run")
    proxy.requests.clear()
    assert [batch.to_arrow()["trajectory"].to_pylist() for batch in run.steps(min_reward=8)] == [[8], [9]]
    assert proxy.counts()["GET"] <= 10 + 2 * 3, "ten footers, and parts of two commits"


def test_a_reader_tails_whatever_its_process_has_cached(bucket: str) -> None:
    import s3fs

    writer = writer_at(f"{bucket}/run")
    writer.append([trajectory(0)])
    ordinary = s3fs.S3FileSystem()  # shared by everybody in the process who asks for one
    folder = f"{bucket.removeprefix('s3://')}/run/{layout.shard_folder(0)}"
    before = ordinary.ls(folder)
    tail = open_run(f"{bucket}/run").tail(poll_seconds=0.02)
    assert len(next(tail)) == 1
    for number in range(1, 5):
        writer.append([trajectory(number)])
    writer.end()
    assert [batch.to_arrow()["trajectory"].to_pylist() for batch in tail] == [[1], [2], [3], [4]]
    assert ordinary.ls(folder) == before, "the cache that would have hidden them"


@pytest.mark.parametrize("fault", ["reset", "lost answer", "hang", "slow", "500", "503"])
def test_a_commit_survives_a_fault(bucket: str, proxy: Proxy, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two requests of each commit are hit, and of each read."""
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 0}}}
    )
    writer = writer_at(f"{bucket}/run")
    hits: dict[str, int] = {}

    def twice(method: str, path: str) -> Fault | None:
        hits[method + path] = hits.get(method + path, 0) + 1
        return fault if hits[method + path] <= 2 and "steps" in path else None

    proxy.fault = twice
    for number in range(2):
        won = writer.append([trajectory(number)])
        assert won is not None
        assert won["trajectory"].to_pylist() == [number]
    writer.end()
    assert open_run(f"{bucket}/run").to_arrow()["trajectory"].to_pylist() == [0, 1]
    proxy.fault = lambda method, path: None
    report = verify(f"{bucket}/run")
    assert (report.ok, report.commits, report.trajectories) == (False, 2, 2)
    assert [fault.what for fault in report.faults] == ["says that the shard is complete; it lacks 38"]


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_first_commit_while_another_writer_lists_is_no_foreign_file(bucket: str, proxy: Proxy, moment: int) -> None:
    """s3fs lists an empty folder in several requests; the commit appears before one of them."""
    first, second = writer_at(f"{bucket}/run"), writer_at(f"{bucket}/run")
    asked: list[str] = []

    def commit_before(method: str, path: str) -> None:
        asked.append(f"{method} {path}")
        if len(asked) == moment:
            first.append([trajectory(0)])

    proxy.fault = commit_before
    second.catch_up()
    proxy.fault = lambda method, path: None
    assert first.done == {0}, "the listing was over before"
    assert second.append([trajectory(1)]) is not None
    assert sorted(open_run(f"{bucket}/run").to_arrow()["trajectory"].to_pylist()) == [0, 1]


def test_an_append_that_failed_may_be_tried_again(bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stored it, and was not reachable after that: the writer finds its own commit later."""
    monkeypatch.setenv("LLMCOLLECT_STORE_PATIENCE_S", "1")
    writer = writer_at(f"{bucket}/run")
    proxy.fault = lambda method, path: "lost answer" if "steps" in path else None
    with pytest.raises(StoreError, match=r"cannot write s3://.*00000000\.parquet"):
        writer.append([trajectory(0)])
    proxy.fault = lambda method, path: None
    assert writer.append([trajectory(0), trajectory(1)]) is not None
    assert open_run(f"{bucket}/run").to_arrow()["trajectory"].to_pylist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "the credentials are refused", marks=needs_users),
        pytest.param({"AWS_ACCESS_KEY_ID": "nobody"}, "the credentials are refused", marks=needs_users),
        pytest.param(STRANGER, "permission denied", marks=needs_users),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials found"),
    ],
)
def test_no_access_is_one_line_without_the_secret(
    bucket: str,
    change: dict[str, str],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "llmcollect")
    monkeypatch.setenv("LLMCOLLECT_STORE_PATIENCE_S", "0.1")
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    options = {"retries": {"max_attempts": 0}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": options})
    for call in (lambda: open_run(f"{bucket}/run"), lambda: writer_at(f"{bucket}/run"), lambda: verify(bucket)):
        with pytest.raises(StoreError, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert SECRET_KEY not in str(caught.value)
        assert "wrong-secret" not in str(caught.value)
    assert SECRET_KEY not in caplog.text


def test_a_bucket_that_does_not_exist_is_named(bucket: str) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket-here/run: the bucket does not exist"):
        open_run("s3://no-such-bucket-here/run")
    with pytest.raises(StoreError, match="the bucket does not exist"):
        writer_at("s3://no-such-bucket-here/run")
    with pytest.raises(StoreError, match=r"holds no run"):
        open_run(f"{bucket}/empty")


def test_a_root_with_credentials_in_it_is_refused_and_not_shown() -> None:
    with pytest.raises(SpecError, match="must not hold credentials") as caught:
        open_files("s3://key:s3cr3t@bucket/run")
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(SpecError, match="names no bucket"):
        open_files("s3://")


def test_nothing_of_the_environment_is_stored(bucket: str, tmp_path: Path) -> None:
    writer = writer_at(f"{bucket}/run")
    writer.append([trajectory(0)])
    writer.end()
    files = open_files(f"{bucket}/run")
    for path in files.sizes(""):
        assert SECRET_KEY.encode() not in (files.read(path) or b""), path
