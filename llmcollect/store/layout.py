"""The one place that knows the names of files below a root."""

import re
from collections.abc import Callable

RUN = "run.json"
STEPS = "steps"
ENDS = "ends"

_COMMIT = re.compile(r"steps/shard-(\d{5,})/(\d{8,})\.parquet")
_END = re.compile(r"ends/shard-(\d{5,})/(\d{8,})\.json")


def shard_folder(shard: int) -> str:
    """Where the commits of a shard are."""
    return f"{STEPS}/shard-{shard:05d}"


def commit_path(shard: int, number: int) -> str:
    """The commit of a shard with this number, counting from 0."""
    return f"{shard_folder(shard)}/{number:08d}.parquet"


def end_path(shard: int, commits: int) -> str:
    """Says that a shard is complete with so many commits.

    The number is part of the name so that a reader that waits for commit n asks for two names and lists nothing, and
    so that a run whose `num_groups` has grown gets a new end without replacing the old one.
    """
    return f"{ENDS}/shard-{shard:05d}/{commits:08d}.json"


def parse_commit_path(path: str) -> tuple[int, int] | None:
    """Shard and number of a commit; None if the path is no commit's."""
    return _parse(_COMMIT, path, commit_path)


def parse_end_path(path: str) -> tuple[int, int] | None:
    """Shard and number of commits of an end; None if the path is no end's."""
    return _parse(_END, path, end_path)


def _parse(pattern: re.Pattern[str], path: str, make: Callable[[int, int], str]) -> tuple[int, int] | None:
    found = pattern.fullmatch(path)
    if not found:
        return None
    pair = int(found[1]), int(found[2])
    return pair if make(*pair) == path else None
