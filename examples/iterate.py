"""Collect a small run and read it twice: live, batch by batch, and again from its Parquet files."""

from functools import partial

from llmcollect import LLMCollector, open_run
from llmcollect.envs import ReasoningGymEnv
from llmcollect.policies import VLLMPolicy

if __name__ == "__main__":  # vLLM starts processes by spawn
    collector = LLMCollector(
        env=partial(ReasoningGymEnv, "gcd", max_value=12),
        policy=partial(VLLMPolicy, "smollm2"),
        num_groups=16,
        group_size=4,
        steps_per_batch=16,
        root="runs/demo",
    )
    for batch in collector:  # a TensorDict, one row a step
        reward = batch["next", "reward"].mean()
        tokens = batch["tokens", "response_length"].sum()
        print(f"{len(batch)} steps, {tokens} sampled tokens, mean reward {reward:.2f}")

    stored = sum(len(batch) for batch in open_run("runs/demo").steps())  # the same rows, from Parquet
    print(f"{stored} steps in runs/demo")
