"""Selection: which trajectories, and which columns of them, a reader wants."""

from collections.abc import Sequence
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.schema import STEP_SCHEMA
from llmcollect.store.record import CommitRecord

# What contexts are rebuilt from, beside the ids.
_STRUCTURE = ("trajectory", "step", "context_reset")


class Filters(TypedDict, total=False):
    """What `Run.steps` and its kin take. A trajectory is kept or left out as a whole.

    Attributes:
        env: Name of an env, or several.
        policy_version: A version, or a pair of the first and the last: it has tokens, all sampled by such a one.
        min_reward: The least sum of its rewards. One without any reward, or with NaN, is left out.
        completed: True: its env ended it; it was neither truncated nor did it fail.
        include_failed: Also trajectories that failed, which are left out otherwise.
    """

    env: str | Sequence[str] | None
    policy_version: int | tuple[int, int] | None
    min_reward: float | None
    completed: bool
    include_failed: bool


class Selection:
    """Filters and columns, as a commit is read with them.

    Attributes:
        reads_a_part: Whether there may be parts of a file that need not be read.
        key_columns: What `trajectories` needs.
        stored_columns: What is read; None: all.

    Raises:
        TypeError: A filter that does not exist.
        ValueError: A column that does not exist.
    """

    def __init__(self, filters: Filters | None = None, columns: Sequence[str] | None = None) -> None:
        given = dict(filters or {})
        unknown = sorted(set(given) - set(Filters.__annotations__))
        if unknown:
            raise TypeError(f"there is no filter {unknown[0]!r}; there are {', '.join(Filters.__annotations__)}")
        missing = [name for name in columns or () if name not in STEP_SCHEMA.names]
        if missing:
            raise ValueError(f"there is no column {missing[0]!r}; the columns are {', '.join(STEP_SCHEMA.names)}")
        env: Any = given.get("env")
        version: Any = given.get("policy_version")
        self._envs = None if env is None else frozenset([env] if isinstance(env, str) else env)
        self._versions = None if version is None else (version, version) if isinstance(version, int) else tuple(version)
        self._least: Any = given.get("min_reward")
        self._completed = bool(given.get("completed"))
        self._failed = bool(given.get("include_failed")) and not self._completed
        self.columns = None if columns is None else tuple(columns)
        chosen = None if columns is None else {*columns, *_STRUCTURE}
        self.stored_columns = None if chosen is None else [name for name in STEP_SCHEMA.names if name in chosen]
        narrow = self._envs is not None or self._versions is not None or self._least is not None or self._completed
        self._narrow = narrow
        self.reads_a_part = narrow or columns is not None
        self.key_columns = [
            name
            for name, used in (
                ("trajectory", True),
                ("env", self._envs is not None),
                ("policy_versions", self._versions is not None),
                ("reward", self._least is not None),
                ("terminated", self._completed),
                ("failure", not self._failed),
            )
            if used
        ]

    def may_hold(self, record: CommitRecord) -> bool:
        """Whether a commit may hold something that is wanted; False lets it unread."""
        if self._envs is not None and not self._envs & set(record.envs):
            return False
        if self._versions is not None:
            low, high = self._versions
            if not any(low <= version <= high for version in record.policy_versions):
                return False
        if self._least is not None and record.best_reward is not None and record.best_reward < self._least:
            return False
        return self._failed or len(record.failed) < len(record.trajectories)

    def drops_some(self, record: CommitRecord) -> bool:
        """Whether trajectories of the commit may have to be left out."""
        return self._narrow or (not self._failed and bool(record.failed))

    def trajectories(self, keys: pa.Table) -> pa.Array:
        """Numbers of the trajectories that are wanted, of whole ones given by their `key_columns`."""
        wanted = pc.unique(keys["trajectory"])
        if self._envs is not None:
            wanted = pc.unique(_of(keys, pc.is_in(keys["env"], value_set=pa.array(sorted(self._envs)))))
        if self._versions is not None:
            low, high = self._versions
            spans = keys["policy_versions"].combine_chunks()
            versions = pc.struct_field(pc.list_flatten(spans), "version")
            owners = keys["trajectory"].take(pc.list_parent_indices(spans))
            inside = pc.and_(pc.greater_equal(versions, low), pc.less_equal(versions, high))
            wanted = _without(_both(wanted, owners.filter(inside)), owners.filter(pc.invert(inside)))
        if self._least is not None:
            sums = keys.group_by("trajectory").aggregate([("reward", "sum")])
            enough = pc.fill_null(pc.greater_equal(sums["reward_sum"], self._least), False)
            wanted = _both(wanted, sums["trajectory"].filter(enough))
        if self._completed:
            wanted = _both(wanted, _of(keys, keys["terminated"]))
        if not self._failed:
            wanted = _without(wanted, _of(keys, pc.is_valid(keys["failure"])))
        return wanted

    def of(self, table: pa.Table) -> pa.Table:
        """The rows of a table of whole trajectories that are wanted."""
        return table.filter(pc.is_in(table["trajectory"], value_set=self.trajectories(table)))

    def cut(self, table: pa.Table) -> pa.Table:
        """Exactly the columns that were asked for, in that order."""
        return table if self.columns is None else table.select(list(self.columns))


def _of(keys: pa.Table, mask: pa.ChunkedArray) -> pa.ChunkedArray:
    return keys["trajectory"].filter(mask)


def _both(left: pa.Array, right: pa.ChunkedArray) -> pa.Array:
    return left.filter(pc.is_in(left, value_set=right.combine_chunks()))


def _without(left: pa.Array, right: pa.ChunkedArray) -> pa.Array:
    return left.filter(pc.invert(pc.is_in(left, value_set=right.combine_chunks())))
