"""Following a run: each shard is asked for its next commit by number, so no stale listing can hide one."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from llmcollect.errors import CorruptFileError
from llmcollect.store import layout
from llmcollect.store.commit import decode_commit
from llmcollect.store.files import Files
from llmcollect.store.record import CommitRecord

_AT_ONCE = 16
_GROWTH = 1.5


@dataclass(slots=True)
class _Shard:
    number: int
    next: int = 0
    pause: float = 0.0
    due: float = 0.0


def tail_run(
    files: Files,
    run: str,
    num_shards: int,
    poll_seconds: float,
    max_poll_seconds: float,
    damaged: Callable[[CorruptFileError, tuple[int, int]], None],
    first: Mapping[int, int] | None = None,
    pause: Callable[[float], object] = time.sleep,
    over: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[CommitRecord, pa.Table]]:
    """The commits of a run as they appear, in order within each shard, until each shard has ended.

    A poll is one request for the next commit, which is its data if it is there, and, only if it is not, one for the
    end with so many commits.

    Args:
        files: Where.
        run: Id of the run.
        num_shards: Number of its shards.
        poll_seconds, max_poll_seconds: The first and the longest pause before a shard is asked again.
        damaged: Called with the error of a commit that is damaged, its shard and number; it may raise.
        first: Number of the first commit that is wanted, by shard; 0 where none is given.
        pause: Sleeps for so long, or less.
        over: Whether nobody writes any more: then it ends where the commits end.

    Raises:
        StoreError: The store cannot be read.
    """
    if not 0 < poll_seconds <= max_poll_seconds:
        raise ValueError(
            f"poll_seconds must be positive and at most max_poll_seconds; got {poll_seconds} and {max_poll_seconds}"
        )
    waiting = [_Shard(number, (first or {}).get(number, 0)) for number in range(num_shards)]
    while waiting:
        last = over()
        now = time.monotonic()
        due = [shard for shard in waiting if last or shard.due <= now]
        if not due:
            pause(min(shard.due for shard in waiting) - now)
            continue
        for start in range(0, len(due), _AT_ONCE):
            part = due[start : start + _AT_ONCE]
            found = files.read_many([layout.commit_path(shard.number, shard.next) for shard in part])
            empty = []
            for shard, data in zip(part, found, strict=True):
                if data is None:
                    empty.append(shard)
                    continue
                try:
                    commit = decode_commit(files, shard.number, shard.next, data, run)
                except CorruptFileError as error:
                    damaged(error, (shard.number, shard.next))
                else:
                    yield commit
                shard.next, shard.pause, shard.due = shard.next + 1, 0.0, 0.0
            ends = files.read_many([layout.end_path(shard.number, shard.next) for shard in empty])
            for shard, end in zip(empty, ends, strict=True):
                if end is not None or last:
                    waiting.remove(shard)
                    continue
                shard.pause = min(max(poll_seconds, shard.pause * _GROWTH), max_poll_seconds)
                shard.due = time.monotonic() + shard.pause
