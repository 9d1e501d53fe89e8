"""An env of one's own: a class with two methods. The model is to say a number's double; it gets a second chance.

python examples/own_env.py
"""

import random
from functools import partial
from typing import Any

from llmcollect import Completion, LLMCollector, Observation, Sampling, Task, Transition
from llmcollect.policies import VLLMPolicy


class DoubleEnv:
    """Asks for the double of a number, at most twice."""

    def reset(self, task: Task) -> Observation:
        self.number = random.Random(task.seed).randint(2, 9)
        self.tries = 0
        return Observation.user(f"What is 2 times {self.number}? Answer with the number alone.", number=self.number)

    def step(self, completion: Completion) -> Transition:
        self.tries += 1
        if str(2 * self.number) in completion.text:
            return Transition(reward=1.0, terminated=True)
        if self.tries == 2:
            return Transition(reward=0.0, terminated=True)
        return Transition(reward=0.0, observation=Observation.user("No. Try again."))


def main(policy: Any = partial(VLLMPolicy, "smollm2")) -> int:
    collector = LLMCollector(
        env=DoubleEnv,
        policy=policy,
        num_groups=8,
        group_size=4,
        steps_per_batch=1,
        yields="groups",  # what GRPO wants: all answers to a question together
        sampling=Sampling(max_tokens=32, temperature=0.7),
    )
    steps = 0
    for batch in collector:
        done = batch["next", "done"][:, 0]
        rewards = batch["next", "reward"][:, 0][done]
        print(f"{batch['text', 'messages'][0]}: rewards {rewards.tolist()}, advantages {rewards - rewards.mean()}")
        steps += len(batch)
    return steps


if __name__ == "__main__":  # vLLM starts processes by spawn
    main()
