"""What a run has come to, per env: read from the store, so that it is the same whoever collected it, and when."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.batch import StepBatch
from llmcollect.store.reader import Run


@dataclass(frozen=True, slots=True)
class EnvSummary:
    """Counts of one env, or of all.

    Attributes:
        tokens_per_s: Sampled tokens over the time in which anything of it was in flight.
        mean_reward: Over trajectories that have one; None if none has.
    """

    env: str
    trajectories: int
    steps: int
    tokens: int
    tokens_per_s: float
    mean_reward: float | None
    truncated: int
    failed: int


HEADERS = ("env", "trajectories", "steps", "tokens", "tokens/s", "mean reward", "truncated", "failed")


def summarise(run: Run) -> list[EnvSummary]:
    """One summary an env in the order of the spec, and one of all of them if there are several."""
    parts: dict[str, list[pa.Table]] = {name: [] for name in run.spec.env_names}
    for batch in run.steps(include_failed=True):
        table = _reduced(batch)
        for name, tables in parts.items():
            tables.append(table.filter(pc.equal(table["env"], name)))
    summaries = [_summary(name, tables) for name, tables in parts.items()]
    if len(summaries) > 1:
        summaries.append(_summary("all", [table for tables in parts.values() for table in tables]))
    return summaries


def cells(summary: EnvSummary) -> tuple[str, ...]:
    """The texts of a table row, in the order of `HEADERS`."""
    reward = "-" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    return (
        summary.env,
        f"{summary.trajectories:,}",
        f"{summary.steps:,}",
        f"{summary.tokens:,}",
        f"{summary.tokens_per_s:,.0f}",
        reward,
        f"{summary.truncated:,}",
        f"{summary.failed:,}",
    )


def markdown(summaries: Sequence[EnvSummary]) -> str:
    """A table for people, in Markdown."""
    lines = [HEADERS, ("---",) * len(HEADERS), *map(cells, summaries)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _reduced(batch: StepBatch) -> pa.Table:
    table = batch.to_arrow()
    columns = ("env", "trajectory", "step", "reward", "truncated", "writer", "started_at", "finished_at")
    tokens = pc.list_value_length(table["response_ids"]).fill_null(0)
    return table.select(columns).append_column("tokens", tokens).append_column("failed", pc.is_valid(table["failure"]))


def _summary(name: str, tables: Iterable[pa.Table]) -> EnvSummary:
    tables = list(tables)
    if not tables:
        return EnvSummary(name, 0, 0, 0, 0.0, None, 0, 0)
    table = pa.concat_tables(tables)
    ended = table.group_by("trajectory").aggregate([("truncated", "any"), ("failed", "any"), ("reward", "sum")])
    rewards = ended.filter(pc.invert(ended["failed_any"]))["reward_sum"]
    mean = pc.mean(rewards).as_py()
    tokens = int(pc.sum(table["tokens"]).as_py() or 0)
    seconds = _busy_seconds(table)
    return EnvSummary(
        env=name,
        trajectories=ended.num_rows,
        steps=int(pc.sum(pc.greater_equal(table["step"], 0)).as_py() or 0),
        tokens=tokens,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        mean_reward=None if mean is None or math.isnan(mean) else mean,
        truncated=int(pc.sum(ended["truncated_any"]).as_py() or 0),
        failed=int(pc.sum(ended["failed_any"]).as_py() or 0),
    )


def _busy_seconds(table: pa.Table) -> float:
    """Length of the union of the writers' spans: the pause before a resume does not count."""
    spans = table.group_by("writer").aggregate([("started_at", "min"), ("finished_at", "max")])
    pairs = zip(spans["started_at_min"].cast(pa.int64()), spans["finished_at_max"].cast(pa.int64()), strict=True)
    busy, until = 0, 0
    for start, end in sorted((start.as_py(), end.as_py()) for start, end in pairs):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6
