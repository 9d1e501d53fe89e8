"""TorchRL's LLMCollector at the same work. Needs the extra `torchrl`.

Its policy is called with a batch of envs and returns when the slowest is answered. `sync_steps` runs its chat env, that
keeps the conversation; `async_trajectories`, where latencies are all that counts, an env as lean as TorchRL allows.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import AsyncEnvPool, Compose, EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm.policies.common import ChatHistory

from benchmarks.simulated import TURNS, draws

Seconds = npt.NDArray[np.float64]


class PeerEnv(EnvBase):  # type: ignore[misc]
    """`size` envs in one, TURNS turns each; a step takes as long as is drawn for the episode's turn."""

    def __init__(self, size: int, seconds: Seconds, episodes: Iterator[int]) -> None:
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
            {name: Unbounded((size, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")},
            shape=(size,),
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        self._turn = 0
        self._episode = next(self._episodes)
        return self._observed("What is the answer?", done=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
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


def chat_policy(envs: int, tokens: int) -> Callable[[TensorDictBase], TensorDictBase]:
    """Answers each conversation at once with `tokens` ids and log-probs."""
    ids, logprobs, text = _response(tokens)

    def policy(batch: TensorDictBase) -> TensorDictBase:
        prompt = batch["history"].prompt
        response = lazy_stack([History(role=["assistant"], content=[text], batch_size=[1]) for _ in range(envs)])
        full = prompt.extend(response, inplace=False, dim=-1)
        batch["history"] = ChatHistory(prompt=prompt, response=response, full=full, batch_size=batch.batch_size)
        batch["tokens"] = TensorDict(response=ids.expand(envs, tokens).clone(), batch_size=batch.batch_size)
        batch["log_probs"] = TensorDict(response=logprobs.expand(envs, tokens).clone(), batch_size=batch.batch_size)
        return batch

    return policy


def drawn_policy(tokens: int, seconds: Seconds) -> Callable[[TensorDictBase], TensorDictBase]:
    """Answers a batch after the longest latency that is drawn for any of it."""
    ids, logprobs, text = _response(tokens)

    def policy(batch: TensorDictBase) -> TensorDictBase:
        shape = batch.batch_size
        episodes, turns = batch["draw"].reshape(-1, 2).numpy().T
        time.sleep(float(seconds[episodes % len(seconds), turns].max()))
        batch["response"] = _texts(text, list(shape))
        batch["tokens_response"] = ids.expand(*shape, tokens).clone()
        batch["log_probs_response"] = logprobs.expand(*shape, tokens).clone()
        return batch

    return policy


def sync_steps(steps: int, envs: int, tokens: int) -> int:
    """Run the sync collector over a ChatEnv until it has yielded `steps` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        questions = [{"query": "What is the answer?"}] * (steps + envs)
        env = TransformedEnv(
            ChatEnv(batch_size=(envs,)),
            Compose(DataLoadingPrimer(dataloader=questions, batch_size=(envs,)), StepCounter(max_steps=TURNS)),
        )
        collector = LLMCollector(
            env, policy=chat_policy(envs, tokens), dialog_turns_per_batch=envs * TURNS, total_dialog_turns=steps
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
        pool = AsyncEnvPool([lambda: PeerEnv(1, env, episodes) for _ in range(envs)], backend="threading", stack="lazy")
        collector = LLMCollector(
            pool,
            policy=drawn_policy(16, engine),
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


def _response(tokens: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    ids = torch.arange(tokens) % 26 + 97
    return ids, -torch.rand(tokens, generator=torch.Generator().manual_seed(0)), "".join(map(chr, ids.tolist()))


def _texts(text: str, shape: list[int]) -> Any:
    if not shape:
        return text
    return NonTensorStack(*[_texts(text, shape[1:]) for _ in range(shape[0])])
