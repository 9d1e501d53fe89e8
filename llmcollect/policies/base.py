"""What a policy is: token ids in, token ids out."""

from typing import Protocol

from llmcollect.rendering import Conversation, Tools
from llmcollect.run import Sampling
from llmcollect.types import Generation


class Policy(Protocol):
    """An LLM that samples. Its constructor is cheap; `start` loads what is heavy.

    An instance belongs to one event loop and serves any number of concurrent calls of `generate`.

    A policy whose weights can change has a method more, `async def update_weights(folder: Path, version: int)`: after
    it, tokens are those of the weights in the folder, and `policy_versions` says so. It may be called while requests
    are in flight; they go on. It raises PolicyError where nothing has changed, and EngineDeadError where the policy
    serves no more.
    """

    def fingerprint(self) -> str:
        """Which model this is, whatever the arguments of its engine; available before `start`.

        Raises:
            SpecError: There is no such model.
        """
        ...

    async def start(self) -> None:
        """Load the model; awaited once, before anything below.

        Raises:
            PolicyError: It cannot be loaded.
        """
        ...

    @property
    def max_context(self) -> int:
        """Most tokens that prompt and response may have together."""
        ...

    def conversation(self, tools: Tools = None) -> Conversation:
        """An empty conversation that renders messages for this model."""
        ...

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        """Sample one response.

        Args:
            prompt_ids: The whole context.
            sampling: How to sample.
            seed: In [0, 2**32); equal seeds give equal samples where the engine is deterministic.
            request_id: Names the request in the engine's own logs.

        Raises:
            PolicyError: The engine refused the request, or died.
        """
        ...

    async def close(self) -> None:
        """Free the model; nothing is called after it."""
        ...
