"""What stragglers cost: lognormal latencies of engine and env steps, 64 envs, 1,280 trajectories of 4 turns.

    python -m benchmarks.stragglers [--trajectories 1280] [--repeats 3]

`efficiency`: trajectories/s over those of ideal list scheduling of the same draws on 64 slots, the lower of async and
blocking envs. `ratio`: over TorchRL's LLMCollector with an AsyncEnvPool and the same draws (extra `torchrl`), or null.
"""

import argparse
import importlib.util
import json
import statistics
import time
from functools import partial

from benchmarks.simulated import TURNS, AsyncEnv, BlockingEnv, DrawnPolicy, drain, ideal_seconds
from llmcollect import Limits, LLMCollector

ENVS, SEED = 64, 0


def product(trajectories: int, env: type) -> float:
    """Trajectories a second of llmcollect."""
    collector = LLMCollector(
        env=partial(env, trajectories, SEED),
        policy=partial(DrawnPolicy, trajectories, SEED),
        num_groups=trajectories,
        steps_per_batch=ENVS,
        limits=Limits(concurrency=ENVS),
    )
    steps, seconds = drain(collector)
    assert steps == trajectories * TURNS
    return trajectories / seconds


def peer(trajectories: int) -> float:
    """Trajectories a second of TorchRL's collector."""
    from benchmarks.peer import async_trajectories

    start = time.perf_counter()
    done = async_trajectories(trajectories, SEED, ENVS)
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1280)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    count = options.trajectories
    has_peer = importlib.util.find_spec("torchrl") is not None
    ideal = count / ideal_seconds(count, SEED, ENVS)
    product(ENVS, AsyncEnv)  # imports
    rates: dict[str, list[float]] = {"async": [], "blocking": [], "peer": []}
    for _ in range(options.repeats):
        rates["async"].append(product(count, AsyncEnv))
        rates["blocking"].append(product(count, BlockingEnv))
        if has_peer:
            rates["peer"].append(peer(count))
        print(", ".join(f"{name} {part[-1]:.1f}/s" for name, part in rates.items() if part), f"(ideal {ideal:.1f}/s)")
    median = {name: statistics.median(part) for name, part in rates.items() if part}
    slower = min(median["async"], median["blocking"])
    print(
        json.dumps(
            {
                "efficiency": slower / ideal,
                "efficiency_async": median["async"] / ideal,
                "efficiency_blocking": median["blocking"] / ideal,
                "ratio": slower / median["peer"] if has_peer else None,
            }
        )
    )


if __name__ == "__main__":
    main()
