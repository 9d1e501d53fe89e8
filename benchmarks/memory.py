"""Memory: a run of any length stays flat, and held batches cost little more than their tokens and log-probs.

    python -m benchmarks.memory [--steps 50000]

`growth`: RSS at the end over RSS after the first 10,000 steps, minus 1, with a consumer that drops the batches.
`ratio`: bytes of RSS a step of StepBatches that are held, over the raw bytes of their tokens (int32) and log-probs
(float32). All rows are held once before, and then three times more: what allocators keep in reserve is there by then.
128 response tokens, 4 turns.
"""

import argparse
import gc
import json
import tempfile
from functools import partial

import psutil
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.simulated import TURNS, InstantEnv, InstantPolicy
from llmcollect import Limits, LLMCollector, open_run

TOKENS, WARM = 128, 10_000
COPIES = 3


def rss() -> int:
    """Bytes of this process that are in memory, what allocators keep in reserve given back."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    return int(psutil.Process().memory_info().rss)


def growth(steps: int, root: str) -> float:
    """Over the steps after the first 10,000."""
    collector = LLMCollector(
        env=InstantEnv,
        policy=partial(InstantPolicy, TOKENS),
        num_groups=steps // TURNS,
        steps_per_batch=256,
        root=root,
        # Room enough that commits are cut by their 4,096 rows, and not because the consumer has to release some.
        limits=Limits(concurrency=64, max_open_trajectories=2048),
    )
    done, warm, next_line = 0, 0, WARM
    for batch in collector:
        done += len(batch)
        del batch
        if done >= next_line:
            now = rss()
            warm = warm or now
            print(f"{done:,} steps: {now / 2**20:,.1f} MiB")
            next_line += WARM
    end = rss()
    collector.close()
    return end / warm - 1


def held(root: str) -> float:
    """Bytes a step of all batches of the run, read so many times and held at once, over the raw ones."""
    first = list(open_run(root).steps())
    before = rss()
    batches = [batch for _ in range(COPIES) for batch in open_run(root).steps()]
    after = rss()
    del first
    steps = sum(map(len, batches))
    raw = 0
    for batch in batches:
        table = batch.to_arrow()
        for column in ("prompt_ids", "response_ids", "response_logprobs"):
            raw += 4 * int(pc.sum(pc.list_value_length(table[column])).as_py())
    print(f"held: {(after - before) / steps:,.0f} bytes a step, raw {raw / steps:,.0f}")
    return (after - before) / raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        grown = growth(options.steps, root)
        ratio = held(root)
    print(json.dumps({"ratio": ratio, "growth": grown}))


if __name__ == "__main__":
    main()
