"""TorchRL's LLMCollector at the same work, as lean as it allows: text in, text, ids and log-probs out.

Needs the extra `torchrl`. Its policy is called with a batch of envs and returns when the slowest is answered.
"""

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import AsyncEnvPool, EnvBase

from benchmarks.simulated import TURNS, draws

Seconds = npt.NDArray[np.float64]


class PeerEnv(EnvBase):  # type: ignore[misc]
    """`size` envs in one, TURNS turns each; with `seconds`, a step takes as long as the slowest that is drawn."""

    def __init__(self, size: int, seconds: Seconds | None = None, episodes: Any = None) -> None:
        super().__init__(batch_size=(size,))
        self._seconds, self._episodes = seconds, episodes
        self._turn = 0
        self._episode = 0
        self.full_observation_spec = Composite(
            text=NonTensor(example_data="a", shape=(size,)), draw=Unbounded((size, 2), dtype=torch.int64), shape=(size,)
        )
        self.full_action_spec = Composite(response=NonTensor(example_data="a", shape=(size,)), shape=(size,))
        self.full_reward_spec = Composite(reward=Unbounded((size, 1)), shape=(size,))
        self.full_done_spec = Composite(
            {name: Unbounded((size, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}, shape=(size,)
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        self._turn = 0
        self._episode = next(self._episodes) if self._episodes else 0
        return self._observed("What is the answer?", done=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._seconds is not None:
            time.sleep(self._seconds[self._episode % len(self._seconds), self._turn])
        self._turn += 1
        out = self._observed("Once more.", done=self._turn == TURNS)
        out["reward"] = torch.ones((*self.batch_size, 1))
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""

    def _observed(self, text: str, done: bool) -> TensorDictBase:
        size = self.batch_size[0]
        flag = torch.full((size, 1), done)
        draw = torch.tensor([[self._episode, min(self._turn, TURNS - 1)]]).expand(size, 2).clone()
        return TensorDict(
            {
                "text": NonTensorStack(*[text] * size),
                "draw": draw,
                "done": flag,
                "terminated": flag.clone(),
                "truncated": torch.zeros_like(flag),
            },
            batch_size=self.batch_size,
        )


def peer_policy(tokens: int, seconds: Seconds | None = None) -> Callable[[TensorDictBase], TensorDictBase]:
    """Answers each env of a batch with `tokens` ids and log-probs; with `seconds`, after the longest latency drawn."""
    ids = torch.arange(tokens) % 26 + 97
    logprobs = -torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    text = "".join(map(chr, ids.tolist()))

    def policy(batch: TensorDictBase) -> TensorDictBase:
        shape = batch.batch_size
        if seconds is not None:
            episodes, turns = batch["draw"].reshape(-1, 2).numpy().T
            time.sleep(float(seconds[episodes % len(seconds), turns].max()))
        batch["response"] = _texts(text, list(shape))
        batch["tokens_response"] = ids.expand(*shape, tokens).clone()
        batch["log_probs_response"] = logprobs.expand(*shape, tokens).clone()
        return batch

    return policy


def sync_steps(steps: int, envs: int, tokens: int) -> int:
    """Run the sync collector until it has yielded `steps` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = LLMCollector(
            PeerEnv(envs),
            policy=peer_policy(tokens),
            dialog_turns_per_batch=envs * TURNS,
            total_dialog_turns=steps,
        )
        done = sum(batch.numel() for batch in collector)
        collector.shutdown()
    return done


def async_trajectories(trajectories: int, seed: int, envs: int) -> int:
    """Run the collector over an AsyncEnvPool until it has yielded so many trajectories."""
    engine, env = draws(trajectories, seed)
    episodes = itertools.count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = AsyncEnvPool(
            [lambda: PeerEnv(1, env, episodes) for _ in range(envs)], backend="threading", stack="lazy"
        )
        collector = LLMCollector(
            pool,
            policy=peer_policy(16, engine),
            yield_completed_trajectories=True,
            total_dialog_turns=-1,  # it counts what is in flight, and would run dry before the last
        )
        done = 0
        for _ in collector:
            done += 1
            if done >= trajectories:
                break
        collector.shutdown()
    return done


def _texts(text: str, shape: list[int]) -> Any:
    if not shape:
        return text
    return NonTensorStack(*[_texts(text, shape[1:]) for _ in range(shape[0])])
