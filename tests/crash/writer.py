"""A process that collects a run and may be killed at any moment.

The run is the same each time: its policy and its envs are deterministic.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from llmcollect.policies.engines import engine_thread
from llmcollect.preflight import open_root
from llmcollect.run import RunSpec
from llmcollect.shard import collect_shard


def spec(shards: int, groups: int, concurrency: int) -> RunSpec:
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
            "limits": {"concurrency": concurrency, "commit_rows": 64, "commit_seconds": 0.1, "max_attempts": 1},
        }
    )


async def collect(root: str, run: RunSpec, ready: Connection) -> None:
    """All shards at once."""
    home = open_root(run, root)
    ready.send(True)
    shards = [collect_shard(run, shard, root=home) for shard in range(run.num_shards)]
    await asyncio.gather(*(engine_thread().run(shard) for shard in shards))


def main(root: str, run: RunSpec, environment: Mapping[str, str], output: str, ready: Connection) -> None:
    """What the process does."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    asyncio.run(collect(root, run, ready))
    sys.stdout.flush()
    os._exit(0)


class Writer:
    """A process that collects: forked from one that has imported everything, so that it is at work soon."""

    def __init__(self, root: str, shards: int, groups: int, concurrency: int = 8) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.crash.writer", "tests.fakes", "llmcollect.store.s3", "s3fs", "pandas"])
        handle, self._output = tempfile.mkstemp()
        os.close(handle)
        self._ready, other = context.Pipe(duplex=False)
        arguments = (root, spec(shards, groups, concurrency), dict(os.environ), self._output, other)
        self.process = context.Process(target=main, args=arguments, daemon=True)
        self.process.start()
        other.close()

    def wait_until_ready(self) -> None:
        """Until it is about to collect."""
        try:
            self._ready.recv()
        except EOFError:
            raise AssertionError(Path(self._output).read_text()) from None

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has finished."""
        if self.process.is_alive() and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # forked by the server, so not held as a zombie for us
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        code, output = self.end()
        assert code == 0, output

    def end(self) -> tuple[int | None, str]:
        """Wait for its end: exit code and output."""
        self.process.join(300)
        return self.process.exitcode, Path(self._output).read_text()
