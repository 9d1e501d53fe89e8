"""The task `generate-shard`: one shard of a run, on this process's engine thread, its progress shown in Prefect."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import llmcollect.prefect_defaults  # noqa: F401  isort: skip - sets what prefect reads at its import
from prefect import get_run_logger, task
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.cache_policies import NO_CACHE

from llmcollect.errors import RunFailedError, SpecError
from llmcollect.policies.engines import engine_thread
from llmcollect.progress import ShardProgress, announced
from llmcollect.run import RunSpec
from llmcollect.shard import Root, collect_shard
from llmcollect.store.files import open_files
from llmcollect.store.record import read_run

_REPORT_SECONDS = 2.0  # a call of Prefect's takes 10 to 1000 ms: a few a minute, and never one a step


async def _worth_a_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Whether another try may go better: not if the spec is wrong, or too much of the run has failed."""
    try:
        await state.aresult()
    except (SpecError, RunFailedError):
        return False
    except Exception:  # noqa: BLE001 - any other failure may pass
        return True
    return True


@task(
    name="generate-shard",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=_worth_a_retry,
    cache_policy=NO_CACHE,  # the store knows what is done
)
async def generate_shard(run: RunSpec, root: str, shard: int) -> dict[str, Any]:
    """Collect what a shard's plan still lacks.

    Returns:
        Its counts.
    """
    progress = announced(ShardProgress(shard))
    files = open_files(root)
    opened = Root(files, read_run(files))
    async with _reported(progress):
        await engine_thread().run(collect_shard(run, shard, root=opened, progress=progress))
    return {"shard": shard, "stored": progress.stored, "trajectories": progress.done, "failed": progress.failed}


@contextlib.asynccontextmanager
async def _reported(progress: ShardProgress) -> AsyncIterator[None]:
    """A progress artifact and a log line whenever the shard has got on."""
    artifact = await acreate_progress_artifact(0.0, key=f"shard-{progress.shard:05d}", description=_line(progress))

    async def report() -> None:
        shown = -1
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            if progress.done != shown:
                shown = progress.done
                await show()

    async def show() -> None:
        share = 100.0 * (progress.stored + progress.done) / max(1, progress.planned or 1)
        await aupdate_progress_artifact(artifact, progress=min(share, 100.0), description=_line(progress))
        get_run_logger().info(_line(progress))

    reporting = asyncio.create_task(report())
    try:
        yield
        await show()
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting


def _line(progress: ShardProgress) -> str:
    reward = "-" if progress.mean_reward is None else f"{progress.mean_reward:.3f}"
    return (
        f"shard {progress.shard}: {progress.stored + progress.done}/{progress.planned or '?'} trajectories, "
        f"{progress.tokens_per_s:,.0f} tokens/s, mean reward {reward}, {progress.failed} failed"
    )
