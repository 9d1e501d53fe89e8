"""Environments: the protocol, the pool that runs them beside the event loop, and the adapters."""

import importlib
from typing import TYPE_CHECKING, Any

from llmcollect.envs.base import Env

if TYPE_CHECKING:
    from llmcollect.envs.dataset import DatasetEnv
    from llmcollect.envs.reasoning import ReasoningGymEnv
    from llmcollect.envs.textarena import TextArenaEnv
    from llmcollect.envs.torchrl import TorchRLEnv

__all__ = ["DatasetEnv", "Env", "ReasoningGymEnv", "TextArenaEnv", "TorchRLEnv"]

# Adapters bring their own dependencies; importing the room must not.
_ADAPTERS = {
    "DatasetEnv": "dataset",
    "ReasoningGymEnv": "reasoning",
    "TextArenaEnv": "textarena",
    "TorchRLEnv": "torchrl",
}


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return getattr(importlib.import_module(f"llmcollect.envs.{_ADAPTERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
