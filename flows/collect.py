"""The flow `collect`: plan the shards of a run, submit one task a shard, sum up.

    RunSpec -> open the root -> generate_shard x num_shards -> summary artifact

The flow awaits its tasks in its own process: only so are they told of a cancellation, and shards that name the same
policy share one engine. What a crash leaves undone, the next run on the same root does.

No `from __future__ import annotations` here: Prefect resolves the parameters' types at run time.
"""

import asyncio
from pathlib import Path
from typing import Any

import llmcollect.prefect_defaults  # noqa: F401  isort: skip - sets what prefect reads at its import
from prefect import flow, get_run_logger
from prefect.artifacts import acreate_markdown_artifact
from prefect.runtime import deployment, flow_run

from llmcollect.demo import DEMO_RUN
from llmcollect.errors import SpecError, single_error
from llmcollect.preflight import open_root
from llmcollect.run import RunSpec
from llmcollect.settings import Settings
from llmcollect.store.reader import open_run
from llmcollect.summary import markdown, summarise
from llmcollect.tasks.generate import generate_shard


@flow(name="collect")
async def collect(run: RunSpec = DEMO_RUN, root: str | None = None) -> dict[str, Any]:
    """Collect a run into a root, or what is still missing of it there.

    Args:
        run: What to collect.
        root: Folder of the run. Without one, a run of a deployment gets a folder of its own below LLMCOLLECT_BASE.

    Returns:
        The root, the id of the run, and the counts of all envs together.
    """
    if run.num_groups is None:
        raise SpecError("the flow needs num_groups: a run without end is for LLMCollector alone")
    where = root_of_run(root)
    get_run_logger().info("collecting %s groups of %s into %s", run.num_groups, run.group_size, where)
    await asyncio.to_thread(open_root, run, where)
    with single_error():
        async with asyncio.TaskGroup() as shards:
            for shard in range(run.num_shards):
                named = generate_shard.with_options(task_run_name=f"shard-{shard:05d}")
                shards.create_task(named(run, where, shard))
    stored = open_run(where)
    summaries = await asyncio.to_thread(summarise, stored)
    await acreate_markdown_artifact(
        key="collect-summary",
        markdown=f"{markdown(summaries)}\n\n`llmcollect show {where}`",
        description=f"What run {stored.record.run} has come to",
    )
    total = summaries[-1]
    return {
        "root": where,
        "run": stored.record.run,
        "trajectories": total.trajectories,
        "failed": total.failed,
        "tokens": total.tokens,
        "mean_reward": total.mean_reward,
    }


def root_of_run(root: str | None) -> str:
    """The root that was asked for, or one named by the flow run, which is the same when the run is retried.

    Raises:
        SpecError: A worker runs the flow in a folder that may be temporary, and the root is not absolute.
    """
    if root is None:
        base = Settings().base or (None if deployment.id else "runs")
        if not base:
            raise SpecError(
                "this deployment has no place for its runs: pass an absolute root, "
                "or set LLMCOLLECT_BASE in the deployment's job variables"
            )
        root = f"{base.rstrip('/')}/{flow_run.id}"
    if deployment.id and "://" not in root and not Path(root).expanduser().is_absolute():
        raise SpecError(f"a run of a deployment needs an absolute root: its folder may be temporary; got {root!r}")
    return root


if __name__ == "__main__":
    asyncio.run(collect())
