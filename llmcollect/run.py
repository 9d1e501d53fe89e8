"""What a run is: `RunSpec`, checked when it is made, and the plan that follows from it.

    RunSpec -> plan_groups(spec, shard) -> GroupPlan -> TrajectoryPlan

The plan is a pure function of the spec: group g lives in shard `g % num_shards`, its env comes from a weighted
schedule that does not look at shards, and every seed is a hash of names and indices. So a plan is never stored, a
resumed run has the same one, and growing `num_groups` leaves the groups before it as they were.
"""

import functools
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.errors import SpecError
from llmcollect.types import Task

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Sampling(_Model):
    """How a policy samples. Part of a run's identity: a run with other values is another run.

    Attributes:
        max_tokens: Most tokens of one response.
        temperature: 0 is greedy.
        top_p, top_k, min_p: The usual truncations; their defaults leave the distribution whole.
        stop: Strings that end a response.
        stop_token_ids: Token ids that end a response, beside the model's own end of turn.
    """

    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class Limits(_Model):
    """Bounds, time-outs and retries. Operational: they may differ when a run is resumed.

    Attributes:
        max_turns: Steps after which a trajectory is truncated; None: until its env ends it.
        max_trajectory_tokens: Tokens (prompt and sampled) at which a trajectory is truncated.
        concurrency: Trajectories in flight per engine.
        max_open_trajectories: Most trajectories that run, or have finished and were not yet taken by the consumer (or,
            where nobody consumes, by the store), before no new group starts. None: four times what the engines hold.
        reset_timeout_s, step_timeout_s: Longest call of an env; making one may take as long as a reset.
        generate_timeout_s: Longest wait for one response.
        trajectory_timeout_s: Longest trajectory, all in all.
        max_attempts: Tries at a trajectory before its failure is recorded.
        max_engine_restarts: How often within an hour an engine that died is built anew.
        max_hung_envs: Env instances a shard may give up during a call that does not return; each holds a thread.
        max_failure_rate: Share of failed trajectories, over the last 200 and after the first 20, that stops the run.
        on_incomplete_group: With `yields="groups"`, whether a group of which members failed is handed out ("keep",
            flagged) or left out ("drop", counted in `LLMCollector.dropped_groups`, and still stored).
        commit_rows, commit_bytes, commit_seconds: A commit is cut when it has so many rows or bytes, or is so old.
    """

    max_turns: int | None = Field(None, ge=1)
    max_trajectory_tokens: int | None = Field(None, ge=1)
    concurrency: int = Field(64, ge=1)
    max_open_trajectories: int | None = Field(None, ge=1)
    reset_timeout_s: _Seconds = 60
    step_timeout_s: _Seconds = 60
    generate_timeout_s: _Seconds = 600
    trajectory_timeout_s: _Seconds | None = None
    max_attempts: int = Field(3, ge=1)
    max_engine_restarts: int = Field(3, ge=0)
    max_hung_envs: int = Field(64, ge=0)
    max_failure_rate: float = Field(0.5, ge=0, le=1)
    on_incomplete_group: Literal["keep", "drop"] = "keep"
    commit_rows: int = Field(4096, ge=1)
    commit_bytes: int = Field(64 << 20, ge=1)
    commit_seconds: _Seconds = 5


class RunSpec(_Model):
    """One collection: what the flow takes as its parameter, the facade builds and `run.json` stores.

    Attributes:
        envs: Environments, each with the weight of its share of the groups.
        policies: One engine each; shard s is served by policy `s % len(policies)`.
        num_groups: Size of the run. None (facade on the local backend alone): unbounded.
        group_size: Trajectories of one task, with different sampling seeds.
        num_shards: Slices of the run that are scheduled, retried and stored apart from each other.
        seed: What every other seed is derived from.

    Raises:
        pydantic.ValidationError: For unknown keys and values out of range; `RunSpec.parse` gives one clear line.
    """

    envs: tuple[EnvSpec, ...] = Field(min_length=1)
    policies: tuple[ComponentSpec, ...] = Field(min_length=1)
    num_groups: int | None = Field(None, ge=1)
    group_size: int = Field(1, ge=1)
    num_shards: int = Field(1, ge=1, le=100_000)
    seed: int = 0
    sampling: Sampling = Sampling()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _bounds_fit(self) -> "RunSpec":
        if len(self.policies) > self.num_shards:
            raise ValueError(
                f"num_shards must be at least the number of policies, {len(self.policies)}: "
                f"a shard names one policy; got {self.num_shards!r}"
            )
        if not sum(env.weight for env in self.envs) < math.inf:
            raise ValueError("the weights of the envs must have a finite sum")
        room = self.limits.max_open_trajectories
        if room is not None and room < self.group_size:
            raise ValueError(
                f"limits.max_open_trajectories must hold a group of {self.group_size} trajectories; got {room!r}"
            )
        return self

    @classmethod
    def parse(cls, data: object) -> "RunSpec":
        """Build a spec from plain data.

        Raises:
            SpecError: One line that names each offending key and says what is wrong with it.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(f"the run spec is not valid: {explain(error)}") from error

    @property
    def env_names(self) -> list[str]:
        """One distinct name an env."""
        return _distinct([env.label for env in self.envs])

    @property
    def policy_names(self) -> list[str]:
        """One distinct name a policy."""
        return _distinct([policy.label for policy in self.policies])

    def policy_of_shard(self, shard: int) -> int:
        """Index of the policy that serves a shard."""
        return shard % len(self.policies)

    def planned(self, trajectories: Iterable[int]) -> int:
        """How many of these trajectories the plan has: a root may hold more, of a run that had grown."""
        if self.num_groups is None:
            return len(list(trajectories))
        return sum(number < self.num_groups * self.group_size for number in trajectories)

    def groups_in_shard(self, shard: int) -> int | None:
        """How many groups the plan gives to a shard; None for an unbounded run."""
        if self.num_groups is None:
            return None
        return len(range(shard, self.num_groups, self.num_shards))


@dataclass(frozen=True, slots=True)
class TrajectoryPlan:
    """One trajectory to collect."""

    trajectory: int
    group: int
    sample: int
    env: int
    task: Task
    seed: int

    def step_seed(self, step: int) -> int:
        """Sampling seed of a step, in [0, 2**32); at any one step it differs between the samples of a group."""
        return (self.seed + _step_offset(step)) % 2**32


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The trajectories of one task."""

    group: int
    shard: int
    trajectories: tuple[TrajectoryPlan, ...]


def plan_groups(spec: RunSpec, shard: int | None = None) -> Iterator[GroupPlan]:
    """The groups of a run in order, or of one shard; without end if `num_groups` is None."""
    schedule = _env_schedule(spec)
    task_counts = [0] * len(spec.envs)
    names = spec.env_names
    for group in count() if spec.num_groups is None else range(spec.num_groups):
        env = next(schedule)
        index = task_counts[env]
        task_counts[env] += 1
        if shard is not None and group % spec.num_shards != shard:
            continue
        task = Task(index=index, seed=derive_seed(spec.seed, "task", names[env], index))
        base = derive_seed(spec.seed, "group", group)
        yield GroupPlan(
            group=group,
            shard=group % spec.num_shards,
            trajectories=tuple(
                TrajectoryPlan(
                    trajectory=group * spec.group_size + sample,
                    group=group,
                    sample=sample,
                    env=env,
                    task=task,
                    # An odd factor makes this one-to-one in `sample`: no two samples of a group share a seed.
                    seed=(base + sample * 0x9E3779B1) % 2**32,
                )
                for sample in range(spec.group_size)
            ),
        )


@functools.cache
def _step_offset(step: int) -> int:
    return derive_seed("step", step)


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**32) that depends on names and indices alone: BLAKE2b over their texts."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def explain(error: ValidationError) -> str:
    """The faults of a validation error in one line."""
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        what = fault["msg"].removeprefix("Value error, ")
        value = fault["input"]
        # Not of containers: they are long, and may hold what should not be repeated.
        tells = fault["type"] != "value_error" and (value is None or isinstance(value, str | int | float))
        got = f"; got {value!r:.80}" if tells else ""
        faults.append(f"{where}: {what}{got}" if where else what)
    return " | ".join(faults)


def _env_schedule(spec: RunSpec) -> Iterator[int]:
    """Env of group 0, 1, 2, ...: shares follow the weights, the order within a block is shuffled by the seed.

    Shares are settled over all blocks so far by largest remainder, so they never drift. The shuffle keeps the
    schedule from running in step with `group % num_shards`, which would confound env and shard.
    """
    total = math.fsum(env.weight for env in spec.envs)
    shares = [env.weight / total for env in spec.envs]
    size = 4 * len(spec.envs)
    given = [0] * len(spec.envs)
    for block in count(1):
        owed = [share * size * block - done for share, done in zip(shares, given, strict=True)]
        counts = [max(0, math.floor(x)) for x in owed]
        by_remainder = sorted(range(len(owed)), key=lambda i: (counts[i] - owed[i], i))
        for i in by_remainder[: size - sum(counts)]:
            counts[i] += 1
        order = [i for i, n in enumerate(counts) for _ in range(n)]
        random.Random(derive_seed(spec.seed, "mixture", block)).shuffle(order)
        given = [a + b for a, b in zip(given, counts, strict=True)]
        yield from order


def _distinct(names: list[str]) -> list[str]:
    twice = {name for name, times in Counter(names).items() if times > 1}
    return [f"{name}#{i}" if name in twice else name for i, name in enumerate(names)]
