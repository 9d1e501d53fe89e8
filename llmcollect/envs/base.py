"""What an environment is: two methods."""

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from llmcollect.errors import EnvError
from llmcollect.types import Completion, Message, Observation, Task, Transition


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


def require_methods(env: Any, name: str) -> None:
    """Check that what a constructor made is an env.

    Raises:
        EnvError: It has no reset() or no step().
    """
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise EnvError(f"env {name} is a {type(env).__name__} without a {method}() method")


def opening(system: str | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages that begin a conversation, after a system message if there is one."""
    return (*([{"role": "system", "content": system}] if system else []), *messages)
