"""Writers that are killed, stopped and woken, several at a time, locally and on S3: nothing is lost, nothing twice.

Each test ends with `verify`, with a comparison to what a run without any trouble gives, and with what a reader saw who
tailed all along.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmcollect import open_run, verify
from llmcollect.errors import StoreError
from llmcollect.store.files import Files, open_files
from tests.crash.writer import Writer
from tests.servers.proxy import Fault, Proxy

SAME = ["trajectory", "step", "env", "prompt_ids", "response_ids", "response_logprobs", "reward", "messages", "seed"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Tail:
    """Reads a run in a thread from its first moment to its end."""

    def __init__(self, root: str) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self.error: BaseException | None = None
        self._root = root
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                try:
                    run = open_run(self._root)
                    break
                except StoreError:
                    time.sleep(0.02)
            for batch in run.tail(poll_seconds=0.02, max_poll_seconds=0.2, include_failed=True):
                table = batch.to_arrow()
                self.rows += zip(*(table[name].to_pylist() for name in ("shard", "trajectory", "step")), strict=True)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def check(self, root: str) -> None:
        """It has ended, and saw what is stored, in commit order within each shard."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the tail did not end"
        assert self.error is None, self.error
        stored = open_run(root).to_arrow(include_failed=True)
        rows = list(zip(*(stored[name].to_pylist() for name in ("shard", "trajectory", "step")), strict=True))
        for shard in {row[0] for row in rows}:
            assert [row for row in self.rows if row[0] == shard] == [row for row in rows if row[0] == shard]
        assert len(self.rows) == len(rows)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run of so many shards and groups is without any trouble."""
    made: dict[tuple[int, int], pa.Table] = {}

    def rows(shards: int, groups: int) -> pa.Table:
        if (shards, groups) not in made:
            root = str(tmp_path_factory.mktemp("undisturbed") / "run")
            Writer(root, shards, groups, concurrency=64).finish()
            made[shards, groups] = comparable(root)
        return made[shards, groups]

    return rows


def comparable(root: str) -> pa.Table:
    table = open_run(root).to_arrow(columns=SAME, include_failed=True)
    return table.sort_by([("trajectory", "ascending"), ("step", "ascending")])


def check(root: str, shards: int, groups: int, undisturbed: Any, tail: Tail) -> None:
    report = verify(root)
    assert report.faults == []
    assert report.complete
    run = open_run(root)
    assert Counter(number for commit in run.commits() for number in commit.trajectories) == Counter(range(2 * groups))
    assert {record.complete for record in run.group_records()} <= {True, False}
    assert comparable(root).equals(undisturbed(shards, groups))
    tail.check(root)


def roots(request: pytest.FixtureRequest, where: str) -> str:
    if where == "local":
        return str(request.getfixturevalue("tmp_path") / "run")
    return f"{request.getfixturevalue('bucket')}/run"


def wait_for_commits(files: Files, enough: int) -> None:
    """Until the store holds so many."""
    limit = time.monotonic() + 120
    while (found := len(files.sizes("steps"))) < enough:
        assert time.monotonic() < limit, f"the writers that run stay at {found} commits of {enough}"
        time.sleep(0.02)


@pytest.mark.server
@pytest.mark.parametrize(("where", "groups"), [("local", 2000), ("s3", 2000)])
def test_kill_9_at_fifty_random_moments(
    request: pytest.FixtureRequest, where: str, groups: int, undisturbed: Any
) -> None:
    root, shards, chance = roots(request, where), 2, random.Random(7)
    tail = Tail(root)
    killed_at = []
    for _ in range(50):
        writer = Writer(root, shards, groups)
        if chance.random() < 0.9:
            writer.wait_until_ready()
        time.sleep(chance.uniform(0, 0.6))
        writer.kill()
        killed_at.append(len(open_files(root).sizes("steps")))
    assert not open_run(root).holds(groups), "it was killed while it worked"
    assert len(set(killed_at)) > 10, "and had got somewhere in between"
    Writer(root, shards, groups, concurrency=64).finish()
    check(root, shards, groups, undisturbed, tail)


@pytest.mark.server
@pytest.mark.parametrize(("where", "writers"), [("local", 2), ("local", 8), ("s3", 2), ("s3", 8)])
def test_writers_of_one_shard_some_of_them_zombies(
    request: pytest.FixtureRequest, where: str, writers: int, undisturbed: Any
) -> None:
    """One half of them, and then the other, is stopped, and goes on behind the others as if nothing had happened."""
    root, groups = roots(request, where), 300
    tail = Tail(root)
    running = [Writer(root, 1, groups) for _ in range(writers)]
    for writer in running:
        writer.wait_until_ready()
        writer.send(signal.SIGSTOP)
    half, files = writers // 2, open_files(root)
    try:
        for others, zombies in ((running[half:], running[:half]), (running[:half], running[half:])):
            for writer in zombies:
                writer.send(signal.SIGSTOP)
            before = len(files.sizes("steps"))
            for writer in others:
                writer.send(signal.SIGCONT)
            wait_for_commits(files, before + 4)
    finally:
        for writer in running:
            writer.send(signal.SIGCONT)
    for writer in running:
        writer.finish()
    assert len({commit.writer for commit in open_run(root).commits()}) > 1, "of both halves one got something in"
    check(root, 1, groups, undisturbed, tail)


@pytest.mark.server
@pytest.mark.parametrize("seed", [0, 1])
def test_two_writers_on_s3_while_the_network_fails(bucket: str, proxy: Proxy, seed: int, undisturbed: Any) -> None:
    """One request in eight meets a fault; answers get lost of commits that another writer races for."""
    chance, lock = random.Random(seed), threading.Lock()
    faults: list[Fault] = ["reset", "lost answer", "slow", "500", "503"]
    met: Counter[str] = Counter()

    def now_and_then(method: str, path: str) -> Fault | None:
        with lock:
            if chance.random() > 0.125:
                return None
            fault = chance.choice(faults)
            met[fault] += 1
            return fault

    root, groups = f"{bucket}/run", 150
    tail = Tail(root)
    proxy.fault = now_and_then
    running = [Writer(root, 1, groups) for _ in range(2)]
    for writer in running:
        writer.finish()
    proxy.fault = lambda method, path: None
    assert min(met[fault] for fault in faults) > 0
    check(root, 1, groups, undisturbed, tail)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(small_disk: Path, undisturbed: Any) -> None:
    root, groups = str(small_disk / "run"), 200
    writer = Writer(root, 1, groups)
    code, error = writer.end()
    assert code == 1
    assert f"cannot write {root}/steps/shard-00000/" in error.splitlines()[-1]
    assert error.splitlines()[-1].endswith("No space left on device")
    assert not verify(root).faults
    tail = Tail(root)
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    Writer(root, 1, groups).finish()
    check(root, 1, groups, undisturbed, tail)


def test_a_folder_made_read_only_is_one_line_and_the_run_goes_on_later(tmp_path: Path, undisturbed: Any) -> None:
    root, groups = tmp_path / "run", 200
    writer = Writer(str(root), 1, groups)
    writer.wait_until_ready()
    steps = root / "steps" / "shard-00000"
    while not steps.exists():
        time.sleep(0.01)
    lock(steps)
    try:
        code, error = writer.end()
    finally:
        unlock(steps)
    assert code == 1
    assert f"cannot write {steps}/" in error.splitlines()[-1]
    assert not verify(root).faults
    tail = Tail(str(root))
    Writer(str(root), 1, groups).finish()
    check(str(root), 1, groups, undisturbed, tail)


def lock(folder: Path) -> None:
    """Nobody can make a file in it: a mode for others, an attribute for root, who stands above modes."""
    if os.geteuid():
        folder.chmod(0o500)
    elif subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False).returncode:
        subprocess.run(["mount", "--bind", "-o", "ro", str(folder), str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


def unlock(folder: Path) -> None:
    if os.geteuid():
        folder.chmod(0o700)
    elif subprocess.run(["chattr", "-i", str(folder)], capture_output=True, check=False).returncode:
        subprocess.run(["umount", str(folder)], check=True)
