"""Python's share: policy and env answer at once, 128 response tokens with log-probs, 4 turns, 64 envs, TensorDicts.

    python -m benchmarks.overhead [--steps 20480] [--repeats 3]

`steps_per_s` of llmcollect; `ratio` to TorchRL's sync LLMCollector over its ChatEnv at the same work (extra `torchrl`),
null without it.
"""

import argparse
import importlib.util
import json
import statistics
import time
from functools import partial

from benchmarks.simulated import TURNS, InstantEnv, InstantPolicy, drain
from llmcollect import Limits, LLMCollector

ENVS, TOKENS = 64, 128


def product(steps: int) -> float:
    """Steps a second of llmcollect."""
    collector = LLMCollector(
        env=InstantEnv,
        policy=partial(InstantPolicy, TOKENS),
        num_groups=steps // TURNS,
        steps_per_batch=ENVS * TURNS,
        limits=Limits(concurrency=ENVS),
    )
    done, seconds = drain(collector)
    assert done == steps, (done, steps)
    return done / seconds


def peer(steps: int) -> float:
    """Steps a second of TorchRL's collector."""
    from benchmarks.peer import sync_steps

    start = time.perf_counter()
    done = sync_steps(steps, ENVS, TOKENS)
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20480)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    has_peer = importlib.util.find_spec("torchrl") is not None
    product(ENVS * TURNS)  # imports
    rates: list[float] = []
    peers: list[float] = []
    for _ in range(options.repeats):
        rates.append(product(options.steps))
        if has_peer:
            peers.append(peer(min(options.steps, 1280)))
        print(f"llmcollect {rates[-1]:,.0f} steps/s" + (f", TorchRL {peers[-1]:,.0f} steps/s" if peers else ""))
    rate = statistics.median(rates)
    theirs = statistics.median(peers) if peers else None
    print(json.dumps({"ratio": rate / theirs if theirs else None, "steps_per_s": rate, "peer_steps_per_s": theirs}))


if __name__ == "__main__":
    main()
