"""Environments: the protocol, the pool that runs them beside the event loop, and the adapters."""

from typing import TYPE_CHECKING, Any

from llmcollect.envs.base import Env

if TYPE_CHECKING:
    from llmcollect.envs.reasoning import ReasoningGymEnv

__all__ = ["Env", "ReasoningGymEnv"]


def __getattr__(name: str) -> Any:
    # Adapters bring their own dependencies; importing the room must not.
    if name == "ReasoningGymEnv":
        from llmcollect.envs.reasoning import ReasoningGymEnv

        return ReasoningGymEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
