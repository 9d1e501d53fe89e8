"""Envs and policies that implement the seams: importable by path, deterministic, without an engine."""

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

from llmcollect.rendering import Conversation
from llmcollect.run import Sampling
from llmcollect.types import Completion, Generation, Message, Observation, Task, Transition

END = 256


class ByteRenderer:
    """One id a byte, END after each message."""

    def begin(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        return [byte for message in messages for byte in (*str(message["content"]).encode(), END)]

    def extend(
        self, prompt_ids: list[int], response_ids: Sequence[int], messages: Sequence[Message], tools: Any = None
    ) -> list[int]:
        return [*([] if response_ids and response_ids[-1] == END else [END]), *self.begin(messages)]

    def parse(self, response_ids: Sequence[int], prompt_ids: list[int], tools: Any = None) -> tuple[str, Message]:
        text = bytes(i for i in response_ids if i < END).decode(errors="replace")
        return text, {"role": "assistant", "content": text}


class BytePolicy:
    """Samples letters from a hash of context and seed: equal for equal seeds, whatever else runs.

    Args:
        tokens: Length of each response, END included.
        delay_s: Latency of a request.
        context: Most tokens of prompt and response.
        fault: "logprobs" gives one too few, "raise" raises, "start" does not start.
    """

    started = 0
    closed = 0

    def __init__(
        self,
        tokens: int = 8,
        delay_s: float = 0.0,
        context: int = 100_000,
        fault: str | None = None,
        name: str = "byte",
    ) -> None:
        self._tokens, self._delay_s, self._context, self._fault, self._name = tokens, delay_s, context, fault, name
        self.in_flight = 0
        self.most_in_flight = 0

    def fingerprint(self) -> str:
        return self._name

    async def start(self) -> None:
        if self._fault == "start":
            raise RuntimeError("no such weights")
        BytePolicy.started += 1

    @property
    def max_context(self) -> int:
        return self._context

    def conversation(self, tools: Any = None) -> Conversation:
        return Conversation(ByteRenderer(), tools)  # type: ignore[arg-type]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        from llmcollect.errors import PromptTooLongError

        if len(prompt_ids) >= self._context:
            raise PromptTooLongError(f"the prompt has {len(prompt_ids)} tokens and {self._context} fit")
        if self._fault == "raise":
            raise ConnectionError("engine says no")
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        count = min(self._tokens, sampling.max_tokens)
        digest = hashlib.shake_128(repr((prompt_ids, seed)).encode()).digest(max(0, count - 1))
        ids = [97 + byte % 26 for byte in digest] + [END] * (count > 0)
        logprobs = [-(i % 7) / 7 for i in ids]
        return Generation(
            token_ids=ids,
            logprobs=logprobs[1:] if self._fault == "logprobs" else logprobs,
            policy_versions=[(3, len(ids))],
            finish_reason="stop",
        )

    async def close(self) -> None:
        BytePolicy.closed += 1


class ToolRenderer(ByteRenderer):
    """Renders the tools first, and takes every response for a call of one."""

    def begin(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        return [*repr(tools).encode(), END, *super().begin(messages)]

    def extend(
        self, prompt_ids: list[int], response_ids: Sequence[int], messages: Sequence[Message], tools: Any = None
    ) -> list[int]:
        return super().begin(messages)

    def parse(self, response_ids: Sequence[int], prompt_ids: list[int], tools: Any = None) -> tuple[str, Message]:
        text, message = super().parse(response_ids, prompt_ids)
        call = {"id": "1", "type": "function", "function": {"name": tools[0]["function"]["name"], "arguments": text}}
        return text, {**message, "content": None, "tool_calls": [call]}


class ToolPolicy(BytePolicy):
    """Calls tools."""

    def conversation(self, tools: Any = None) -> Conversation:
        return Conversation(ToolRenderer(), tools)  # type: ignore[arg-type]


class MortalPolicy(BytePolicy):
    """Whose engine dies at its fifth request, `deaths` times in this process; a new one takes a moment to come up."""

    left: dict[str, int] = {}  # noqa: RUF012 - counts over instances on purpose

    def __init__(self, deaths: int, key: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.left.setdefault(key, deaths)
        self._key, self._requests = key, 0

    async def start(self) -> None:
        await asyncio.sleep(0.2)
        self._started = True

    def conversation(self, tools: Any = None) -> Conversation:
        assert self._started, "start() comes first"
        return super().conversation(tools)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        from llmcollect.errors import EngineDeadError

        self._requests += 1
        if self._requests >= 5 and self.left[self._key] > 0:
            await asyncio.sleep(0.01)
            if self._requests < 1000:
                self.left[self._key] -= 1
                self._requests = 1000  # all that is in flight hears of the same death
            raise EngineDeadError("it is no more")
        return await super().generate(prompt_ids, sampling, seed, request_id)


class CountEnv:
    """Asks `turns` times and rewards the share of vowels of the last answer."""

    def __init__(self, turns: int = 2, delay_s: float = 0.0, text: str = "question") -> None:
        self._turns, self._delay_s, self._text = turns, delay_s, text
        self._left = 0

    def reset(self, task: Task) -> Observation:
        self._left = self._turns
        self._task = task
        return Observation.user(f"{self._text} {task.index} {task.seed}", answer=task.seed)

    def step(self, completion: Completion) -> Transition:
        if self._delay_s:
            time.sleep(self._delay_s)
        self._left -= 1
        vowels = sum(letter in "aeiou" for letter in completion.text)
        return Transition(
            reward=vowels / max(1, len(completion.text)),
            observation=Observation.user(f"{self._left} left"),
            terminated=self._left == 0,
            info={"left": self._left},
        )


class AsyncCountEnv(CountEnv):
    """The same without a thread."""

    async def reset(self, task: Task) -> Observation:  # type: ignore[override]
        return super().reset(task)

    async def step(self, completion: Completion) -> Transition:  # type: ignore[override]
        return super().step(completion)


class FaultyEnv(CountEnv):
    """Fails for some tasks.

    Args:
        fault: Where and how: see the code.
        every: Tasks whose index is a multiple of it fail.
        marker: A folder that counts tries; with it, only the first try at a task fails.
    """

    def __init__(self, fault: str, every: int = 1, marker: str | None = None, turns: int = 2) -> None:
        super().__init__(turns)
        self._fault, self._every, self._marker = fault, every, marker
        if fault == "constructor":
            raise OSError("no dataset here")

    def reset(self, task: Task) -> Any:
        observation = super().reset(task)
        self._bad = task.index % self._every == 0
        if self._bad and self._marker is not None:
            try:
                os.mkdir(f"{self._marker}/{task.index}")
            except FileExistsError:
                self._bad = False
        if self._bad and self._fault == "reset":
            raise ValueError("bad reset")
        if self._bad and self._fault == "reset type":
            return 42
        if self._bad:
            match self._fault:
                case "message":
                    return Observation(messages=["hello"])  # type: ignore[list-item]
                case "finished":
                    return Transition(reward=1.0, terminated=True)
                case "silent":
                    return Observation(messages=())
                case "no text":
                    return Observation(messages=({"role": "user"},))
                case "surrogate":
                    return Observation.user("a \ud800 b")
                case "info":
                    return Observation(messages=observation.messages, info=[1])  # type: ignore[arg-type]
        return observation

    def step(self, completion: Completion) -> Any:
        transition = super().step(completion)
        if not self._bad or self._left:
            return transition
        match self._fault:
            case "step":
                raise ValueError("bad step")
            case "hang":
                time.sleep(3)
            case "step type":
                return None
            case "die":
                os._exit(3)
            case "sleep":
                time.sleep(3600)
            case "reward":
                return Transition(reward="high", terminated=True)  # type: ignore[arg-type]
            case "exit":
                raise SystemExit(3)
            case "stop iteration":
                raise StopIteration
        return transition


class OddInfoEnv(CountEnv):
    """Puts what JSON does not know into info."""

    def step(self, completion: Completion) -> Transition:
        import numpy as np

        info = {"score": np.float32(0.5), "array": np.arange(3), "raw": b"\x00\xff", 5: object(), "text": "\ud800\x00"}
        return Transition(reward=float("nan"), terminated=True, info=info)


def not_an_env() -> object:
    """A constructor of something without methods."""
    return object()


class SummaryEnv(CountEnv):
    """Replaces the context by a summary before its last turn."""

    def step(self, completion: Completion) -> Transition:
        transition = super().step(completion)
        if self._left != 1:
            return transition
        summary = Observation([{"role": "user", "content": "In short."}], new_context=True)
        return Transition(reward=0.0, observation=summary)


class ToolEnv(CountEnv):
    """Offers a tool, and answers a call of it as a tool."""

    def reset(self, task: Task) -> Observation:
        first = super().reset(task)
        tool = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
        return Observation(messages=first.messages, tools=[tool])

    def step(self, completion: Completion) -> Transition:
        self._left -= 1
        call = completion.message["tool_calls"][0]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"].upper()}
        return Transition(reward=1.0, observation=Observation([answer]), terminated=self._left == 0)


class SlowStartEnv(CountEnv):
    """Whose constructor does not return."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        time.sleep(seconds)


class TextEnv(CountEnv):
    """Says one thing, whatever it is."""

    def __init__(self, text: str, turns: int = 1) -> None:
        super().__init__(turns)
        self._said = text

    def reset(self, task: Task) -> Observation:
        super().reset(task)
        return Observation.user(self._said)
