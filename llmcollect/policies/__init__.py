"""Policies: the protocol, the thread that owns their engines, and the engines."""

from typing import TYPE_CHECKING, Any

from llmcollect.policies.base import Policy

if TYPE_CHECKING:
    from llmcollect.policies.vllm import VLLMPolicy

__all__ = ["Policy", "VLLMPolicy"]


def __getattr__(name: str) -> Any:
    if name == "VLLMPolicy":
        from llmcollect.policies.vllm import VLLMPolicy

        return VLLMPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
