"""Policies: the protocol, the thread that owns their engines, and the engines."""

import importlib
from typing import TYPE_CHECKING, Any

from llmcollect.policies.base import Policy

if TYPE_CHECKING:
    from llmcollect.policies.tensordict import TensorDictPolicy
    from llmcollect.policies.vllm import VLLMPolicy

__all__ = ["Policy", "TensorDictPolicy", "VLLMPolicy"]

_ENGINES = {"TensorDictPolicy": "tensordict", "VLLMPolicy": "vllm"}


def __getattr__(name: str) -> Any:
    if name in _ENGINES:
        return getattr(importlib.import_module(f"llmcollect.policies.{_ENGINES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
