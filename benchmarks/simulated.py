"""An engine and envs whose latencies are drawn in advance, so that an ideal schedule of the same draws is known."""

import asyncio
import functools
import heapq
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcollect import LLMCollector
from llmcollect.rendering import Conversation, Message, Tools
from llmcollect.run import Sampling
from llmcollect.types import Completion, Generation, Observation, Task, Transition

TURNS = 4
END = 256


@functools.cache
def draws(trajectories: int, seed: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds of each request and of each env step, both [trajectories, TURNS]; lognormal."""
    rng = np.random.default_rng(seed)
    shape = (trajectories, TURNS)
    return rng.lognormal(np.log(0.050), 1.0, shape), rng.lognormal(np.log(0.020), 1.5, shape)


def ideal_seconds(trajectories: int, seed: int, slots: int) -> float:
    """List scheduling: each trajectory, in order, goes to the slot that is free first."""
    engine, env = draws(trajectories, seed)
    free = [0.0] * slots
    for duration in (engine + env).sum(axis=1):
        heapq.heappush(free, heapq.heappop(free) + float(duration))
    return max(free)


def drain(collector: LLMCollector, count: Callable[[Any], int] = len) -> tuple[int, float]:
    """Read a collector to its end: what its batches count up to (rows), and the seconds that it took."""
    start = time.perf_counter()
    total = sum(map(count, collector))
    seconds = time.perf_counter() - start
    collector.close()
    return total, seconds


class ByteRenderer:
    """One id a byte, END after each message: rendering costs next to nothing."""

    def begin(self, messages: list[Message], tools: Tools = None) -> list[int]:
        return [byte for message in messages for byte in (*str(message["content"]).encode(), END)]

    def extend(self, prompt: list[int], response: list[int], messages: list[Message], tools: Tools = None) -> list[int]:
        return self.begin(messages)

    def parse(self, response: list[int], prompt: list[int], tools: Tools = None) -> tuple[str, Message]:
        text = bytes(response[:-1]).decode()
        return text, {"role": "assistant", "content": text}


class InstantPolicy:
    """Answers at once with `tokens` ids and log-probs."""

    def __init__(self, tokens: int = 128) -> None:
        self._ids = [*range(97, 97 + 26)] * (tokens // 26 + 1)
        self._ids = [*self._ids[: tokens - 1], END]
        self._logprobs = (-np.random.default_rng(0).random(tokens)).tolist()

    def fingerprint(self) -> str:
        return "simulated"

    async def start(self) -> None:
        """Nothing to load."""

    @property
    def max_context(self) -> int:
        return 1 << 30

    def conversation(self, tools: Tools = None) -> Conversation:
        return Conversation(ByteRenderer(), tools)  # type: ignore[arg-type]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        return Generation(list(self._ids), list(self._logprobs), [(0, len(self._ids))], "stop")

    async def close(self) -> None:
        """Nothing to free."""


class DrawnPolicy(InstantPolicy):
    """Answers after the time that is drawn for the trajectory's turn."""

    def __init__(self, trajectories: int, seed: int) -> None:
        super().__init__(16)
        self._seconds = draws(trajectories, seed)[0]

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        trajectory, _, turn = map(int, request_id.split("-"))
        await asyncio.sleep(self._seconds[trajectory, turn])
        return await super().generate(prompt_ids, sampling, seed, request_id)


class InstantEnv:
    """TURNS turns, each answered at once; without a thread."""

    async def reset(self, task: Task) -> Observation:
        self._turn, self._task = 0, task
        return Observation.user("What is the answer?")

    async def step(self, completion: Completion) -> Transition:
        self._turn += 1
        return Transition(reward=1.0, observation=Observation.user("Once more."), terminated=self._turn == TURNS)


class BlockingEnv:
    """Its steps take the time that is drawn for the trajectory's turn, and block."""

    def __init__(self, trajectories: int, seed: int) -> None:
        self._seconds = draws(trajectories, seed)[1]

    def reset(self, task: Task) -> Observation:
        self._turn, self._task = 0, task
        return Observation.user("What is the answer?")

    def step(self, completion: Completion) -> Transition:
        time.sleep(self._seconds[self._task.index, self._turn])
        return self._answer()

    def _answer(self) -> Transition:
        self._turn += 1
        return Transition(reward=1.0, observation=Observation.user("Once more."), terminated=self._turn == TURNS)


class AsyncEnv(BlockingEnv):
    """The same with `async def`."""

    async def reset(self, task: Task) -> Observation:  # type: ignore[override]
        return super().reset(task)

    async def step(self, completion: Completion) -> Transition:  # type: ignore[override]
        await asyncio.sleep(self._seconds[self._task.index, self._turn])
        return self._answer()
