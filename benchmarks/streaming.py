"""What reading costs: steps/s that reach a consumer as TensorDicts of 256 rows, over those of the bare rollout.

    python -m benchmarks.streaming [--steps 10240] [--repeats 3]

A step is 128 response tokens with log-probs; 4 turns, 256 trajectories in flight. The bare rollout is `collect_shard`
alone, without a root: it makes Arrow tables of as many rows as for a consumer in memory, nobody reads them, and no
tensors are made. Over it, all in turn within a repeat, as the median of the repeats' ratios:

ratio           iteration
queue           `start(queue=queue.Queue(4))`, read by another thread
replay_buffer   `start(replay_buffer=...)`, TorchRL's with a LazyStackStorage that holds all rows (extra `torchrl`)
ray             iteration with `backend="ray"`, one actor on this machine (extra `ray`)
tail            `open_run(root).tail()` of a run that `collect_shard` in this process commits to a local folder, split
                and made TensorDicts; polled 10 times a second, for a run of 4 s would feel the wait for its last
                commit as a long one does not

At the top level the engine takes 50 to 150 ms for an answer, so that the bare rollout comes to about 2,300 steps/s, as
with a fast GPU: does the way keep up with it? Below `instant` it answers at once, and Python is the bound: what making
and reading tensors takes from the rollout on the same cores; four times the steps, for they pass in less time.
`bare_steps_per_s` is the median of the bare rates. A way whose extra is missing is null.

One clock for all, also for the actor: from where the engine is up and the first trajectory begins
(`ShardProgress.started_at`, monotonic, the same for all processes of the machine) to where the last row is there. What
happens once is left out: the start of an actor's process, imports, a first small run of each way. A new actor's first
delivery, which imports a little more, is not.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.simulated import TURNS, InstantPolicy
from llmcollect import Limits, LLMCollector, open_run
from llmcollect.backends.local import cut_for_memory
from llmcollect.policies.engines import engine_thread
from llmcollect.preflight import open_root
from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec, Sampling
from llmcollect.shard import collect_shard
from llmcollect.streaming import EndOfRun
from llmcollect.types import Generation

IN_FLIGHT, TOKENS, ROWS, SECONDS = 256, 128, 256, 0.1
LIMITS = Limits(concurrency=IN_FLIGHT)
ENV = {"target": "benchmarks.simulated:InstantEnv"}
POLICIES: dict[str, dict[str, Any]] = {
    "latency": {"target": "benchmarks.streaming:LatencyPolicy", "kwargs": {"tokens": TOKENS, "seconds": SECONDS}},
    "instant": {"target": "benchmarks.simulated:InstantPolicy", "kwargs": {"tokens": TOKENS}},
}


class LatencyPolicy(InstantPolicy):
    """Answers after a time between half and one and a half times `seconds`, which follows from the step's seed."""

    def __init__(self, tokens: int, seconds: float) -> None:
        super().__init__(tokens)
        self._seconds = seconds

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        await asyncio.sleep(self._seconds * (0.5 + seed % 1024 / 1024))
        return await super().generate(prompt_ids, sampling, seed, request_id)


def spec_of(policy: dict[str, Any], steps: int) -> RunSpec:
    """The run of so many steps."""
    return RunSpec.parse(
        {"envs": [ENV], "policies": [policy], "num_groups": steps // TURNS, "limits": LIMITS.model_dump()}
    )


def collector_of(policy: dict[str, Any], steps: int, **options: Any) -> LLMCollector:
    """The collector of the same run."""
    return LLMCollector(
        env=ENV, policy=policy, num_groups=steps // TURNS, steps_per_batch=ROWS, limits=LIMITS, **options
    )


def rate(done: int, steps: int, progress: ShardProgress, end: float) -> float:
    """Steps a second."""
    assert done == steps, (done, steps)
    assert progress.started_at is not None
    return steps / (end - progress.started_at)


def counted(batches: Iterable[Any]) -> tuple[int, float]:
    """Rows, and when the last of them came."""
    done, end = 0, 0.0
    for batch in batches:
        done += len(batch)
        end = time.monotonic()
    return done, end


def bare(policy: dict[str, Any], steps: int) -> float:
    """Nobody reads."""
    progress = engine_thread().submit(collect_shard(cut_for_memory(spec_of(policy, steps), ROWS), 0)).result()
    return rate(progress.steps, steps, progress, time.monotonic())


def iteration(policy: dict[str, Any], steps: int, **options: Any) -> float:
    """A for loop."""
    with collector_of(policy, steps, **options) as collector:
        done, end = counted(collector)
        return rate(done, steps, collector.progress()[0], end)


def by_queue(policy: dict[str, Any], steps: int) -> float:
    """A bounded queue.Queue."""
    batches: queue.Queue[Any] = queue.Queue(4)
    with collector_of(policy, steps) as collector:
        collector.start(queue=batches)
        done, end = counted(iter(batches.get, EndOfRun()))
        return rate(done, steps, collector.progress()[0], end)


def replay_buffer(policy: dict[str, Any], steps: int) -> float:
    """TorchRL's."""
    from torchrl.data import LazyStackStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyStackStorage(steps))
    with collector_of(policy, steps) as collector:
        collector.start(replay_buffer=buffer)
        collector.join()
        return rate(len(buffer), steps, collector.progress()[0], time.monotonic())


def ray(policy: dict[str, Any], steps: int) -> float:
    """A for loop over what an actor sends."""
    return iteration(policy, steps, backend="ray")


def tail(policy: dict[str, Any], steps: int) -> float:
    """What somebody else commits."""
    spec, progress = spec_of(policy, steps), ShardProgress(0)
    with tempfile.TemporaryDirectory() as root:
        opened = open_root(spec, root)
        writing = engine_thread().submit(collect_shard(spec, 0, root=opened, progress=progress))
        commits = open_run(root).tail(poll_seconds=0.1, max_poll_seconds=0.1)
        done, end = counted(part.to_tensordict() for commit in commits for part in commit.split(ROWS))
        writing.result()
    return rate(done, steps, progress, end)


def ways() -> dict[str, Callable[[dict[str, Any], int], float] | None]:
    """What is measured over the bare rollout; None where the extra is missing."""
    has = {name: importlib.util.find_spec(name) is not None for name in ("ray", "torchrl")}
    return {
        "ratio": iteration,
        "queue": by_queue,
        "replay_buffer": replay_buffer if has["torchrl"] else None,
        "ray": ray if has["ray"] else None,
        "tail": tail,
    }


def measure(policy: dict[str, Any], steps: int, repeats: int) -> dict[str, float | None]:
    """Medians of the ratios, and of the bare rates."""
    measured = {"bare": bare} | {name: way for name, way in ways().items() if way}
    for way in measured.values():
        way(policy, IN_FLIGHT * TURNS)
    rates: dict[str, list[float]] = {name: [] for name in measured}
    for repeat in range(repeats):
        for name, way in list(measured.items())[:: -1 if repeat % 2 else 1]:
            rates[name].append(way(policy, steps))
        shown = {("iteration" if name == "ratio" else name): found[-1] for name, found in rates.items()}
        print(", ".join(f"{name} {steps_per_s:,.0f}" for name, steps_per_s in shown.items()), "steps/s", flush=True)
    ratios: dict[str, float | None] = dict.fromkeys(ways())
    for name in measured.keys() - {"bare"}:
        ratios[name] = statistics.median(own / of for own, of in zip(rates[name], rates["bare"], strict=True))
    return ratios | {"bare_steps_per_s": statistics.median(rates["bare"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10240)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    steps = options.steps // TURNS * TURNS
    if ways()["ray"]:
        import ray as cluster

        cluster.init(include_dashboard=False, log_to_driver=False, num_cpus=2, logging_level=logging.ERROR)
    found: dict[str, Any] = measure(POLICIES["latency"], steps, options.repeats)
    print("instant:")
    found["instant"] = measure(POLICIES["instant"], 4 * steps, options.repeats)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
