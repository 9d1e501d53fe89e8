"""StepBatch: rows of steps, as Arrow on the way to files and as a TensorDict on the way to a trainer.

    [Trajectory] -> trajectories_to_table -> StepBatch -> to_tensordict -> StepTensorDict
                                                 ^------ from_tensordict ------'

Rows hold deltas (`prompt_ids` is what the policy had not seen before), a TensorDict holds the whole context. So a
batch keeps, beside its own rows, the earlier rows of their trajectories, and rebuilds contexts from Arrow's offsets
in compiled loops.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.schema import STEP_SCHEMA
from llmcollect.types import Step, Trajectory

if TYPE_CHECKING:  # torch and tensordict take seconds to import, and reading a run needs neither
    from tensordict import TensorDict

    from llmcollect.tensors import StepTensorDict

_Ints = npt.NDArray[np.int64]

_TEXTS = {
    "task": ("text", "task"),
    "messages": ("text", "messages"),
    "response_text": ("text", "response"),
    "response_message": ("text", "response_message"),
    "observation": ("text", "observation"),
    "info": ("text", "info"),
    "failure": ("text", "failure"),
    "finish_reason": ("text", "finish_reason"),
    "stop_reason": ("text", "stop_reason"),
    "run": ("collector", "run"),
    "writer": ("collector", "writer"),
    "env": ("collector", "env"),
    "policy": ("collector", "policy"),
}
_NUMBERS = {
    "trajectory": ("collector", "traj_ids"),
    "group": ("collector", "group"),
    "sample": ("collector", "sample"),
    "step": ("collector", "step"),
    "shard": ("collector", "shard"),
    "attempt": ("collector", "attempt"),
    "task_index": ("collector", "task_index"),
    "seed": ("collector", "seed"),
    "context_reset": ("collector", "context_reset"),
}
_TIMES = {name: ("collector", name) for name in ("started_at", "generated_at", "finished_at")}
_NO_TIME = np.iinfo(np.int64).min


class Arrays:
    """The columns of a table as numpy arrays, each made when it is first asked for.

    Attributes:
        names: Of the columns that there are.
    """

    def __init__(self, table: pa.Table) -> None:
        self.names = set(table.column_names)
        self._table = table
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._valid: dict[str, npt.NDArray[np.bool_]] = {}

    def column(self, name: str) -> npt.NDArray[Any]:
        """Numbers as int64, times as microseconds (`_NO_TIME` where there is none), rewards with NaN for null."""
        if name not in self._columns:
            column = self._table[name]
            if name in _TIMES:
                column = column.cast(pa.int64()).fill_null(int(_NO_TIME))
            elif name == "reward":
                column = column.fill_null(np.nan)
            array = _numpy(column)
            self._columns[name] = array.astype(np.int64) if array.dtype.kind == "i" else array
        return self._columns[name]

    def valid(self, name: str) -> npt.NDArray[np.bool_]:
        """Whether the value is there."""
        if name not in self._valid:
            self._valid[name] = _numpy(pc.is_valid(self._table[name]))
        return self._valid[name]

    @functools.cached_property
    def float32_rewards(self) -> npt.NDArray[np.float32]:
        """Infinite beyond what float32 holds."""
        with np.errstate(over="ignore"):
            return self.column("reward").astype(np.float32)

    @functools.cached_property
    def context_starts(self) -> _Ints:
        """For each row the row where its context begins."""
        starts = (_numpy(self._table["step"]) <= 0) | _numpy(self._table["context_reset"])
        return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))

    @functools.cached_property
    def prompts(self) -> "Lists":
        """int32: the ids that were new."""
        return self._lists("prompt_ids")

    @functools.cached_property
    def responses(self) -> "Lists":
        """int32: the ids that were sampled."""
        return self._lists("response_ids")

    @functools.cached_property
    def logprobs(self) -> "Lists":
        """float32: of each sampled id; empty where none were given."""
        return self._lists("response_logprobs")

    @functools.cached_property
    def versions(self) -> tuple[_Ints, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Run-lengths: where those of each row start, their versions and their counts."""
        column = self._stored("policy_versions")
        runs = _whole(column).flatten()
        version, count = (runs.field(name).to_numpy(zero_copy_only=False) for name in ("version", "count"))
        return _starts(column), version, count

    def _lists(self, name: str) -> "Lists":
        return Lists.of(self._stored(name))

    def _stored(self, name: str) -> pa.ChunkedArray:
        """Of the type of the schema, whatever the table was made by."""
        column, kind = self._table[name], STEP_SCHEMA.field(name).type
        return column if column.type == kind else column.cast(kind)


class Lists(NamedTuple):
    """A column of lists: those of row r are `values[starts[r] : starts[r + 1]]`. Null is an empty list.

    Attributes:
        starts: int64 [rows + 1].
        values: Of all rows end to end.
    """

    starts: _Ints
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "Lists":
        """Without a copy if the column has one chunk and no nulls in its lists."""
        return cls(_starts(column), _whole(column).flatten().to_numpy(zero_copy_only=False))

    def lengths(self, rows: _Ints) -> _Ints:
        """int64, of the lists of these rows."""
        return self.starts[rows + 1] - self.starts[rows]


class StepBatch:
    """Rows of steps.

    Indexing with a slice or an array of row numbers gives a batch; nothing is copied. `len`, `split` and
    `StepBatch.concat` work as expected.

    Args:
        table: Rows with the columns of `llmcollect.schema.STEP_SCHEMA`. The rows of a trajectory must be
            consecutive and in order, from its step 0 or a `context_reset` on.
        rows: Which rows of the table the batch consists of, an integer array; None: all. The other rows are there
            for the contexts that they hold.

    Raises:
        IndexError: There is no such row.
    """

    def __init__(self, table: pa.Table, rows: _Ints | None = None) -> None:
        self._table = table
        numbers = np.arange(table.num_rows)
        self._rows: _Ints = numbers if rows is None else numbers[rows]
        self._shared: Arrays | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shared": None}  # it is made anew of the table

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"StepBatch({len(self)} steps)"

    def __getitem__(self, key: slice | Sequence[int] | _Ints) -> "StepBatch":
        if isinstance(key, int):
            key = [key]
        return StepBatch(self._table, self._rows[key])._trimmed()

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        lengths = pc.list_value_length(self.to_arrow()["response_ids"])
        return int(pc.sum(lengths).as_py() or 0)

    def to_arrow(self) -> pa.Table:
        """The rows as they are stored."""
        first, count = (int(self._rows[0]), len(self._rows)) if len(self._rows) else (0, 0)
        if np.array_equal(self._rows, np.arange(first, first + count)):
            return self._table.slice(first, count)
        return self._table.take(self._rows)

    def without_failed(self) -> "StepBatch":
        """Without the rows of trajectories that ended in a failure."""
        own = self.to_arrow()
        failed = own.filter(pc.is_valid(own["failure"]))["trajectory"]
        if not len(failed):
            return self
        return self[np.flatnonzero(~_numpy(pc.is_in(own["trajectory"], value_set=failed.combine_chunks())))]

    def split(self, size: int) -> Iterator["StepBatch"]:
        """Batches of `size` rows; the last may be shorter."""
        shared = self._shared or Arrays(self._table)  # what is made of the table's columns is made once
        for start in range(0, len(self), size):
            part = StepBatch(self._table, self._rows[start : start + size])
            part._shared = shared
            yield part

    @staticmethod
    def concat(batches: Sequence["StepBatch"]) -> "StepBatch":
        """The rows of several batches in order."""
        if not batches:
            return StepBatch(STEP_SCHEMA.empty_table())
        if len(batches) == 1:
            return batches[0]
        offsets = np.cumsum([0, *(batch._table.num_rows for batch in batches)])
        rows = [batch._rows + offset for batch, offset in zip(batches, offsets[:-1], strict=True)]
        return StepBatch(pa.concat_tables([batch._table for batch in batches]), np.concatenate(rows))

    def to_tensordict(self, context: Literal["full", "delta"] = "full") -> "StepTensorDict":
        """A dense TensorDict of batch size [B], right-padded with 0.

        Args:
            context: "full": `("tokens", "prompt")` is all that the policy saw; "delta": only what was new to it.

        Returns:
            With P, R and F the longest prompt, response and their sum in the batch:

            - `("tokens", "prompt")` int64 [B, P], `("tokens", "response")` int64 [B, R],
              `("tokens", "full")` int64 [B, F]: prompt and response; their lengths, int64 [B], under
              `"prompt_length"`, `"response_length"`; `"new_prompt_length"` counts the prompt's last ids that were new
            - `("tokens", "policy_version")` int64 [B, R]: which weights sampled the token; -1 on padding
            - `("log_probs", "response")` float32 [B, R], `("log_probs", "full")` float32 [B, F]: 0 outside of
              the response, NaN where the policy gave none; `("log_probs", "given")` bool [B]
            - `("masks", "all_attention_mask")` bool [B, F]: not padding; `("masks", "all_assistant_mask")` bool
              [B, F]: sampled in this step
            - `("next", "reward")` float32 [B, 1], NaN where there is none; `("next", "done")`, `"terminated"`,
              `"truncated"` bool [B, 1]
            - `("text", ...)`: texts and JSON; `("collector", ...)`: where the row comes from, int64 or text [B],
              with times in UTC microseconds, and the reward as float64
        """
        arrays, rows = self._shared or Arrays(self._table), self._rows
        have = arrays.names
        values: dict[tuple[str, ...], Any] = {}
        if {"prompt_ids", "response_ids"} <= have:
            values |= self._conversations(arrays, context)
        if "reward" in have:
            values["next", "reward"] = arrays.float32_rewards[rows][:, None]
            values["collector", "reward"] = arrays.column("reward")[rows]
            values["collector", "has_reward"] = arrays.valid("reward")[rows]
        for name in ("terminated", "truncated"):
            if name in have:
                values["next", name] = arrays.column(name)[rows][:, None]
        if {"terminated", "truncated", "failure"} <= have:
            over = values["next", "terminated"] | values["next", "truncated"]
            values["next", "done"] = over | arrays.valid("failure")[rows][:, None]
        for name, key in (_NUMBERS | _TIMES).items():
            if name in have:
                values[key] = arrays.column(name)[rows]
        own = self.to_arrow()
        texts: dict[tuple[str, ...], Any] = {key: own[name] for name, key in _TEXTS.items() if name in have}
        return _tensordict(values, texts, len(self))

    def _conversations(self, arrays: Arrays, context: Literal["full", "delta"]) -> dict[tuple[str, ...], Any]:
        """What is made of ids, log-probs and versions."""
        from llmcollect.padding import pad_logprobs, pad_masks, pad_tokens, pad_versions

        rows, prompts, responses = self._rows, arrays.prompts, arrays.responses
        new, sampled = prompts.lengths(rows), responses.lengths(rows)
        first = arrays.context_starts[rows] if context == "full" else rows
        before = prompts.starts[rows] - prompts.starts[first] + responses.starts[rows] - responses.starts[first]
        prompt_length = before + new

        def empty(lengths: _Ints, kind: npt.DTypeLike) -> npt.NDArray[Any]:
            return np.empty((len(rows), int(lengths.max(initial=0))), kind)

        prompt, response = empty(prompt_length, np.int64), empty(sampled, np.int64)
        full = empty(prompt_length + sampled, np.int64)
        pad_tokens(rows, first, *prompts, *responses, prompt, response, full)
        attention, assistant = np.empty(full.shape, np.bool_), np.empty(full.shape, np.bool_)
        pad_masks(prompt_length, sampled, attention, assistant)
        values: dict[tuple[str, ...], Any] = {
            ("tokens", "prompt"): prompt,
            ("tokens", "prompt_length"): prompt_length,
            ("tokens", "new_prompt_length"): new,
            ("tokens", "response"): response,
            ("tokens", "response_length"): sampled,
            ("tokens", "full"): full,
            ("masks", "all_attention_mask"): attention,
            ("masks", "all_assistant_mask"): assistant,
        }
        if "response_logprobs" in arrays.names:
            own, beside = np.empty(response.shape, np.float32), np.empty(full.shape, np.float32)
            pad_logprobs(rows, prompt_length, sampled, *arrays.logprobs, own, beside)
            values |= {("log_probs", "response"): own, ("log_probs", "full"): beside}
            values["log_probs", "given"] = arrays.valid("response_logprobs")[rows]
        if "policy_versions" in arrays.names:
            versions = np.empty(response.shape, np.int64)
            pad_versions(rows, *arrays.versions, sampled, versions)
            values["tokens", "policy_version"] = versions
        return values

    @classmethod
    def from_tensordict(cls, batch: "TensorDict") -> "StepBatch":
        """The inverse of `to_tensordict`: equal rows, and equal contexts when converted again."""
        arrays = {key: batch[key].numpy(force=True) for key in _tensor_keys(batch)}
        tokens, total = arrays["tokens", "prompt"], arrays["tokens", "prompt_length"]
        new, sampled = arrays["tokens", "new_prompt_length"], arrays["tokens", "response_length"]
        generated = arrays["collector", "generated_at"] != _NO_TIME
        in_response = np.arange(arrays["tokens", "response"].shape[1]) < sampled[:, None]
        place = np.arange(tokens.shape[1])
        is_new = (place >= (total - new)[:, None]) & (place < total[:, None])
        started = arrays["collector", "step"] >= 0

        columns: dict[str, Any] = {
            "prompt_ids": _lists(tokens[is_new], new, started, "prompt_ids"),
            "response_ids": _lists(arrays["tokens", "response"][in_response], sampled, generated, "response_ids"),
            "response_logprobs": _lists(
                arrays["log_probs", "response"][in_response & arrays["log_probs", "given"][:, None]],
                np.where(arrays["log_probs", "given"], sampled, 0),
                arrays["log_probs", "given"],
                "response_logprobs",
            ),
            "policy_versions": [
                _run_lengths(versions[:length]) if ok else None
                for versions, length, ok in zip(arrays["tokens", "policy_version"], sampled, generated, strict=True)
            ],
            "reward": pa.array(arrays["collector", "reward"], mask=~arrays["collector", "has_reward"]),
            "terminated": arrays["next", "terminated"][:, 0],
            "truncated": arrays["next", "truncated"][:, 0],
        }
        columns |= {name: arrays[key] for name, key in _NUMBERS.items()}
        columns |= {
            name: pa.array(arrays[key], mask=arrays[key] == _NO_TIME).cast(STEP_SCHEMA.field(name).type)
            for name, key in _TIMES.items()
        }
        columns |= {name: list(batch[key]) for name, key in _TEXTS.items()}
        own = _table(columns)

        # A row whose earlier steps are not in the batch gets them back as one hidden row before it.
        hidden = np.flatnonzero(total > new)
        if not len(hidden):
            return cls(own)
        before = place < (total - new)[:, None]
        history = own.take(hidden)
        for name, value in (
            ("prompt_ids", _lists(tokens[hidden][before[hidden]], (total - new)[hidden], None, "prompt_ids")),
            ("response_ids", pa.nulls(len(hidden), STEP_SCHEMA.field("response_ids").type)),
            ("response_logprobs", pa.nulls(len(hidden), STEP_SCHEMA.field("response_logprobs").type)),
            ("policy_versions", pa.nulls(len(hidden), STEP_SCHEMA.field("policy_versions").type)),
            ("context_reset", pa.repeat(True, len(hidden))),
        ):
            history = history.set_column(history.schema.get_field_index(name), STEP_SCHEMA.field(name), value)
        order = np.argsort(np.concatenate([hidden - 0.5, np.arange(len(own))]), kind="stable")
        return cls(pa.concat_tables([history, own]).take(order), np.flatnonzero(order >= len(hidden)))

    def compact(self) -> "StepBatch":
        """A copy that holds no rows but its own and those of their contexts: to keep a few of many."""
        starts = Arrays(self._table).context_starts[self._rows]
        edges = np.zeros(self._table.num_rows + 1, np.int64)
        np.add.at(edges, starts, 1)
        np.add.at(edges, self._rows + 1, -1)
        needed = np.cumsum(edges)[:-1] > 0
        return StepBatch(self._table.take(np.flatnonzero(needed)), np.cumsum(needed)[self._rows] - 1)

    def _trimmed(self) -> "StepBatch":
        """Without the rows before the first context and after the last row: a slice holds no more than it needs."""
        if not len(self._rows):
            return StepBatch(self._table.slice(0, 0))
        starts = Arrays(self._table).context_starts[self._rows]
        start, end = int(starts.min()), int(self._rows.max()) + 1
        return StepBatch(self._table.slice(start, end - start), self._rows - start)


def trajectories_to_table(
    trajectories: Sequence[Trajectory], *, run: str, shard: int, writer: str, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of finished trajectories, each one's steps consecutive and in order.

    Raises:
        ValueError: Ids, log-probs and version counts of a step do not have one length.
    """
    pairs = [(trajectory, step) for trajectory in trajectories for step in trajectory.steps]
    for trajectory, step in pairs:
        _check_lengths(trajectory, step)
    steps = [step for _, step in pairs]
    data: dict[str, Any] = {
        "run": pa.repeat(run, len(pairs)),
        "shard": pa.repeat(pa.scalar(shard, pa.int32()), len(pairs)),
        "writer": pa.repeat(writer, len(pairs)),
        "task": [trajectory.task if step.step <= 0 else None for trajectory, step in pairs],
        "policy_versions": [
            None if step.policy_versions is None else [{"version": v, "count": n} for v, n in step.policy_versions]
            for step in steps
        ],
    }
    for name in ("trajectory", "group", "sample", "attempt", "env", "task_index", "policy"):
        data[name] = [getattr(trajectory, name) for trajectory, _ in pairs]
    for name in STEP_SCHEMA.names:
        if name not in data:
            data[name] = [getattr(step, name) for step in steps]
    return _table(data)


def _check_lengths(trajectory: Trajectory, step: Step) -> None:
    count = len(step.response_ids or ())
    versions = sum(n for _, n in step.policy_versions or ())
    logprobs = count if step.response_logprobs is None else len(step.response_logprobs)
    if not count == versions == logprobs:
        raise ValueError(
            f"trajectory {trajectory.trajectory}, step {step.step}: {count} response ids, {logprobs} log-probs "
            f"and version counts that sum to {versions} must be one number"
        )


def _table(columns: Mapping[str, Any]) -> pa.Table:
    arrays = [
        value if isinstance(value := columns[field.name], pa.Array | pa.ChunkedArray) else pa.array(value, field.type)
        for field in STEP_SCHEMA
    ]
    return pa.table(arrays, schema=STEP_SCHEMA)


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = _whole(column).to_numpy(zero_copy_only=False)
    return array


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """As one array; copied only if there are several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _starts(column: pa.ChunkedArray) -> _Ints:
    """Where each list begins among the values of all, and where the last one ends; null counts as empty."""
    lengths = _numpy(pc.list_value_length(column).fill_null(0))
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _run_lengths(versions: _Ints) -> list[dict[str, int]]:
    edges = np.flatnonzero(np.diff(versions)) + 1
    pieces = np.split(versions, edges) if len(versions) else []
    return [{"version": int(piece[0]), "count": len(piece)} for piece in pieces]


def _lists(values: npt.NDArray[Any], lengths: _Ints, valid: npt.NDArray[np.bool_] | None, column: str) -> pa.ListArray:
    kind = STEP_SCHEMA.field(column).type
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = None if valid is None else pa.array(~valid)
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind, mask=mask)


def _tensor_keys(batch: "TensorDict") -> Iterator[tuple[str, ...]]:
    for key in batch.keys(include_nested=True, leaves_only=True):
        if hasattr(batch[key], "numpy"):
            yield key


def _tensordict(
    values: Mapping[tuple[str, ...], npt.NDArray[Any]], texts: Mapping[tuple[str, ...], pa.ChunkedArray], size: int
) -> "StepTensorDict":
    import torch
    from tensordict import NonTensorData

    from llmcollect.tensors import StepTensorDict, TextStack

    columns: dict[str, dict[str, Any]] = {}
    for (group, name), array in values.items():
        columns.setdefault(group, {})[name] = torch.from_numpy(array)
    for (group, name), items in texts.items():
        columns.setdefault(group, {})[name] = TextStack.of(items) if size else NonTensorData([], batch_size=[0])
    return StepTensorDict.of_columns(columns, size)
