"""What an environment is: two methods."""

from collections.abc import Awaitable
from typing import Protocol

from llmcollect.types import Completion, Observation, Task, Transition


class Env(Protocol):
    """A conversation partner that rewards.

    Either method may be `def` or `async def`. Blocking ones run in a thread that belongs to the instance alone, so an
    env need not be thread-safe; async ones run on the event loop of the rollouts and must not block it. An instance is
    used for many trajectories, one after the other, and never again once a method raised or timed out. An optional
    `close()` is called at the end.

        class Echo:
            def reset(self, task):
                return Observation.user(f"Say {task.seed}.")

            def step(self, completion):
                return Transition(reward=float(str(self.seed) in completion.text), terminated=True)
    """

    def reset(self, task: Task) -> Observation | str | Awaitable[Observation | str]:
        """Begin a trajectory; a text counts as one user message."""
        ...

    def step(self, completion: Completion) -> Transition | Awaitable[Transition]:
        """Answer the policy's response."""
        ...
