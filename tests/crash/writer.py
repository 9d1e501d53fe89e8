"""A process that collects a run and may be killed at any moment: python -m tests.crash.writer ROOT [SHARDS]

It prints "ready" once it is about to collect. The run is the same each time: its policy and its envs are deterministic.
"""

import asyncio
import os
import sys

from llmcollect.policies.engines import engine_thread
from llmcollect.preflight import open_root
from llmcollect.run import RunSpec
from llmcollect.shard import collect_shard


def spec(shards: int, groups: int) -> RunSpec:
    """Pairs of trajectories of four turns, some of which fail, in many small commits."""
    return RunSpec.parse(
        {
            "envs": [
                {"target": "tests.fakes:AsyncCountEnv", "kwargs": {"turns": 4}, "weight": 9},
                {"target": "tests.fakes:FaultyEnv", "kwargs": {"fault": "step", "turns": 4}, "weight": 1},
            ],
            "policies": [{"target": "tests.fakes:BytePolicy", "kwargs": {"delay_s": 0.01}}],
            "num_groups": groups,
            "group_size": 2,
            "num_shards": shards,
            "limits": {"concurrency": 8, "commit_rows": 24, "commit_seconds": 0.1, "max_attempts": 1},
        }
    )


async def collect(root: str, run: RunSpec) -> None:
    """All shards at once."""
    home = open_root(run, root)
    print("ready", flush=True)
    shards = [collect_shard(run, shard, root=home) for shard in range(run.num_shards)]
    await asyncio.gather(*(engine_thread().run(shard) for shard in shards))


if __name__ == "__main__":
    asyncio.run(collect(sys.argv[1], spec(int(sys.argv[2]), int(sys.argv[3]))))
    sys.stdout.flush()
    os._exit(0)
