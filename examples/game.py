"""A game of several turns: guess a number from 1 to 10. The game runs in a process of its own.

python examples/game.py
"""

from functools import partial
from typing import Any

from llmcollect import EnvSpec, Limits, LLMCollector, Sampling
from llmcollect.envs import TextArenaEnv
from llmcollect.policies import VLLMPolicy


def main(policy: Any = partial(VLLMPolicy, "smollm2")) -> int:
    hint = "Answer with a number in square brackets and nothing else, such as [5]."
    game = partial(TextArenaEnv, "GuessTheNumber-v0", min_number=1, max_number=10, system=hint)
    collector = LLMCollector(
        env=EnvSpec.of(game, isolate="process"),  # a crash or a hang there costs one game
        policy=policy,
        num_groups=4,
        group_size=2,
        steps_per_batch=1,
        yields="trajectories",
        sampling=Sampling(max_tokens=24, temperature=0.7),
        limits=Limits(max_turns=8, concurrency=4),
    )
    steps = 0
    for batch in collector:
        print(f"game {batch['collector', 'traj_ids'][0]}: reward {batch['next', 'reward'][-1].item():.2f}")
        for response, observation in zip(batch["text", "response"], batch["text", "observation"], strict=True):
            print(f"    {response!r} -> {observation}")
        steps += len(batch)
    return steps


if __name__ == "__main__":  # vLLM starts processes by spawn
    main()
