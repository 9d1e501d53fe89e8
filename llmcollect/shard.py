"""collect_shard: env, policy, rollout and store made one. Every backend calls this function.

    plan - done -> admission -> rollout (many at once) -> committer -> emit
                        ^                                               |
                        '------------- room, once taken ----------------'

The groups of the plan are let in one after the other (waits for room; unblocked by whoever takes rows). Each
trajectory waits for a slot of its engine, runs, and goes to the committer, which writes beside them. The committer is
the one part that must see the end: it is closed after the last trajectory, also when the shard is cancelled or fails,
so what has finished is never lost.
"""

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from llmcollect.admission import Admission
from llmcollect.batch import trajectories_to_table
from llmcollect.envs.pool import EnvPool
from llmcollect.errors import RunFailedError, single_error
from llmcollect.policies.engines import Engine, engine_thread
from llmcollect.progress import ShardProgress
from llmcollect.rollout import collect_trajectory
from llmcollect.run import RunSpec, TrajectoryPlan, plan_groups
from llmcollect.schema import STEP_SCHEMA
from llmcollect.store.committer import Committer
from llmcollect.store.files import Files
from llmcollect.store.record import RunRecord
from llmcollect.store.writer import ShardWriter
from llmcollect.types import Trajectory

Emit = Callable[[pa.Table, Sequence[int]], Awaitable[None]]

_FAILURE_WINDOW = 200
_FAILURE_GRACE = 20


@dataclass(frozen=True, slots=True)
class Root:
    """An opened root: its files, and the run that it holds."""

    files: Files
    record: RunRecord


async def collect_shard(
    spec: RunSpec,
    shard: int,
    *,
    root: Root | None = None,
    skip: Collection[int] = (),
    admission: Admission | None = None,
    progress: ShardProgress | None = None,
    emit: Emit | None = None,
) -> ShardProgress:
    """Collect what a shard's plan still lacks. Runs on the loop of the process's `engine_thread()`.

    Args:
        spec: The run.
        shard: Number of the shard.
        root: Where commits go; None keeps nothing.
        skip: Without a root, trajectories that somebody has already.
        admission: Bounds what is open; shared by the shards of one consumer. None: a bound of the shard's own, of
            which rows are taken by their commit.
        progress: Counters to write to.
        emit: Awaited with the rows of each commit once it has won, and the numbers of the trajectories whose room is
            to be released when the rows are taken (those that another writer had committed have no rows).

    Returns:
        The counters.

    Raises:
        RunFailedError: More than `max_failure_rate` of the trajectories failed.
        EnvError, PolicyError, StoreError: An env cannot be made, the engine cannot start, the disk refuses.
    """
    progress = progress or ShardProgress(shard)
    writer = ShardWriter(root.files, root.record, spec, shard) if root else None
    if writer:
        await asyncio.to_thread(writer.catch_up)
    progress.planned = None if spec.num_groups is None else (spec.groups_in_shard(shard) or 0) * spec.group_size
    # The writer's set grows with what other writers are found to have committed: it need not be collected once more.
    done = writer.done if writer else set(skip)
    progress.stored = spec.planned(done)
    if progress.planned is None or progress.stored < progress.planned:
        await _collect_missing(spec, shard, writer, done, admission, progress, emit)
    # An unbounded run arrives here when it was told to finish: its plan is what it holds.
    if writer and (progress.planned is None or spec.planned(writer.done) >= progress.planned):
        await asyncio.to_thread(writer.end)
    progress.end()
    return progress


async def _collect_missing(
    spec: RunSpec,
    shard: int,
    writer: ShardWriter | None,
    done: Set[int],
    admission: Admission | None,
    progress: ShardProgress,
    emit: Emit | None,
) -> None:
    own_bound = admission is None
    bound = admission or make_admission(spec)
    known = frozenset(done)
    append = (
        writer.append
        if writer
        else partial(trajectories_to_table, run=uuid.uuid4().hex[:16], shard=shard, writer=uuid.uuid4().hex[:16])
    )

    async def taken(trajectories: Sequence[Trajectory], table: pa.Table | None) -> None:
        rows = STEP_SCHEMA.empty_table() if table is None else table
        progress.commits += table is not None
        progress.duplicates += len(trajectories) - int(pc.count_distinct(rows["trajectory"]).as_py())
        if emit is not None:
            await emit(rows, [item.trajectory for item in trajectories])
        elif own_bound:
            await bound.release(len(trajectories))

    def urgent() -> bool:
        return bound.starving or (emit is not None and not running)  # nobody else will fill the commit then

    committer = Committer(append, taken, urgent, spec.limits)
    bound.when_starving(committer.wake)
    pools = [EnvPool(env, name) for env, name in zip(spec.envs, spec.env_names, strict=True)]
    policy = spec.policies[spec.policy_of_shard(shard)]
    policy_name = spec.policy_names[spec.policy_of_shard(shard)]
    failures = FailureRate(spec.limits.max_failure_rate)
    running = 0

    async def collect_one(plan: TrajectoryPlan, engine: Engine) -> None:
        nonlocal running
        async with engine.slots:
            trajectory = await collect_trajectory(plan, spec, engine, policy_name, pools[plan.env])
        progress.add(trajectory)
        progress.hung_envs = sum(pool.hung for pool in pools)
        progress.late_results = sum(pool.late for pool in pools)
        running -= 1
        committer.add(trajectory)
        bound.finish()
        failures.add(trajectory)
        if progress.hung_envs > spec.limits.max_hung_envs:
            raise RunFailedError(
                f"{progress.hung_envs} calls of envs do not return, more than max_hung_envs="
                f"{spec.limits.max_hung_envs} allows; the last one of {pools[plan.env].name}: "
                f'isolate="process" lets them be ended'
            )

    with single_error():
        async with asyncio.TaskGroup() as life:
            writing = life.create_task(committer.run())
            try:
                async with (
                    engine_thread().lease(policy, spec.limits.concurrency) as engine,
                    asyncio.TaskGroup() as trajectories,
                ):
                    progress.start()
                    for group in plan_groups(spec, shard):
                        missing = [plan for plan in group.trajectories if plan.trajectory not in done]
                        progress.stored += sum(
                            plan.trajectory in done and plan.trajectory not in known for plan in group.trajectories
                        )
                        if missing:
                            if not await bound.admit(len(missing)):
                                break
                            running += len(missing)
                            for plan in missing:
                                trajectories.create_task(collect_one(plan, engine))
            finally:
                committer.close()
                await asyncio.wait([writing])
                for pool in pools:
                    pool.close()


class FailureRate:
    """Stops a run in which too much fails: over the last 200 trajectories, once there are 20."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last: deque[bool] = deque(maxlen=_FAILURE_WINDOW)

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory.

        Raises:
            RunFailedError: More than the limit failed.
        """
        self._last.append(trajectory.failed)
        failed = sum(self._last)
        if trajectory.failed and len(self._last) >= _FAILURE_GRACE and failed > self._limit * len(self._last):
            why = json.loads(trajectory.steps[-1].failure or "{}")
            raise RunFailedError(
                f"{failed} of the last {len(self._last)} trajectories failed, more than max_failure_rate="
                f"{self._limit:g} allows; the last one in {trajectory.env}: {why.get('type')}: {why.get('message')}"
            )


def make_admission(spec: RunSpec) -> Admission:
    """Room for enough trajectories to keep every engine full while commits and consumers take theirs."""
    limits = spec.limits
    busy = limits.concurrency * len(spec.policies)
    return Admission(limits.max_open_trajectories or max(4 * busy, spec.group_size), busy)
