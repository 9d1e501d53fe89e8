"""GRPO with TorchRL's loss: the collector generates with vLLM, each update's weights go back into its engine.

collector -> to_torchrl -> MCAdvantage -> replay buffer -> GRPOLoss -> save_pretrained -> update_weights

Needs the extra `torchrl`. Trains SmolLM2 to answer in lower-case letters; a folder with another model may be named.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from llmcollect import Completion, Limits, LLMCollector, Observation, Sampling, Task, Transition
from llmcollect.policies import VLLMPolicy, smollm2


class LowerCase:
    """Rewards the share of lower-case letters in the answer."""

    def reset(self, task: Task) -> Observation:
        return Observation.user(f"Say something about the number {task.seed % 100}.")

    def step(self, completion: Completion) -> Transition:
        letters = sum(letter in "abcdefghijklmnopqrstuvwxyz" for letter in completion.text)
        return Transition(reward=letters / max(1, len(completion.text)), terminated=True)


def main(model: str, updates: int = 10, lr: float = 1e-5, group_size: int = 8, **engine_args: object) -> list[float]:
    """Train for so many updates; the mean reward of the batch that each of them learned from."""
    torch.manual_seed(0)
    disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    actor = TransformersWrapper(network, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=False)
    loss_module = GRPOLoss(actor, entropy_bonus=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(1000),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=group_size, prompt_key=("collector", "group")),
        batch_size=32,
    )
    collector = LLMCollector(
        env=LowerCase,
        policy=partial(VLLMPolicy, model, dtype="float32", **engine_args),
        group_size=group_size,
        steps_per_batch=64,
        yields="groups",
        sampling=Sampling(max_tokens=16, temperature=1.0),
        limits=Limits(concurrency=64, max_open_trajectories=64),  # it runs no further ahead of the updates
    )
    rewards: list[float] = []
    with collector, tempfile.TemporaryDirectory() as folder:
        for update, batch in enumerate(collector, 1):
            rewards.append(float(batch["next", "reward"].mean()))
            age = update - 1 - int(batch["tokens", "policy_version"].max())
            print(f"update {update}: mean reward {rewards[-1]:.3f}, newest tokens {age} updates old")
            buffer.empty()
            buffer.extend(batch.to_torchrl())
            for rows in buffer:
                loss = loss_module(rows).loss_objective
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if update == updates:
                break
            network.save_pretrained(folder)
            collector.update_weights(Path(folder), update)
    return rewards


if __name__ == "__main__":  # vLLM starts processes by spawn
    main(sys.argv[1] if len(sys.argv) > 1 else str(smollm2.materialise("float32")))
