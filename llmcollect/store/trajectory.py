"""StoredTrajectory: a trajectory read back, its conversation and its token sequences rebuilt from the rows' deltas."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TokenContext:
    """One unbroken sequence of ids that a policy saw and sampled.

    Attributes:
        token_ids: int64 [T], prompts and responses in order.
        loss_mask: bool [T], True where the id was sampled.
        logprobs: float32 [T], 0 where the id was not sampled, NaN where the policy gave none.
    """

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory read back.

    Attributes:
        reward: Sum of the steps' rewards; None if no step has one.
        messages: The conversation, the env's last answer included.
        contexts: One, or one more for each `context_reset`.
        failure: type, message and traceback if it failed.
    """

    trajectory: int
    group: int
    sample: int
    env: str
    policy: str
    reward: float | None
    terminated: bool
    truncated: bool
    messages: list[dict[str, Any]]
    contexts: list[TokenContext]
    failure: dict[str, Any] | None
    rows: list[dict[str, Any]] = field(repr=False)


def trajectories_in(table: pa.Table) -> Iterator[StoredTrajectory]:
    """The trajectories of rows that hold whole ones, each one's consecutive and in order."""
    rows: list[dict[str, Any]] = []
    for row in table.to_pylist():
        if rows and row["trajectory"] != rows[0]["trajectory"]:
            yield _trajectory(rows)
            rows = []
        rows.append(row)
    if rows:
        yield _trajectory(rows)


def _trajectory(rows: list[dict[str, Any]]) -> StoredTrajectory:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    last = rows[-1]
    return StoredTrajectory(
        trajectory=last["trajectory"],
        group=last["group"],
        sample=last["sample"],
        env=last["env"],
        policy=last["policy"],
        reward=sum(rewards) if rewards else None,
        terminated=last["terminated"],
        truncated=last["truncated"],
        messages=_conversation(rows),
        contexts=_contexts(rows),
        failure=json.loads(last["failure"]) if last["failure"] else None,
        rows=rows,
    )


def _conversation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for row in rows:
        if row["context_reset"] and row["step"] > 0:
            messages.append({"role": "system", "content": "[the context starts anew]"})
        messages += json.loads(row["messages"] or "[]")
        if row["response_text"] is not None:
            parsed = row["response_message"]
            messages.append(json.loads(parsed) if parsed else {"role": "assistant", "content": row["response_text"]})
    messages += json.loads(rows[-1]["observation"] or "[]")
    return messages


def _contexts(rows: list[dict[str, Any]]) -> list[TokenContext]:
    contexts: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["prompt_ids"] is None:
            continue
        if row["context_reset"] or not contexts:
            contexts.append([])
        contexts[-1].append(row)
    return [_context(part) for part in contexts]


def _context(rows: list[dict[str, Any]]) -> TokenContext:
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for row in rows:
        response = row["response_ids"] or []
        ids += row["prompt_ids"] + response
        sampled += [False] * len(row["prompt_ids"]) + [True] * len(response)
        given = row["response_logprobs"]
        own = [float("nan")] * len(response) if given is None else [float("nan") if x is None else x for x in given]
        logprobs += [0.0] * len(row["prompt_ids"]) + own
    return TokenContext(np.array(ids, np.int64), np.array(sampled, np.bool_), np.array(logprobs, np.float32))
