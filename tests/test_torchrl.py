"""In TorchRL's world: its losses, its replay buffers, and weights that go back into the engine."""

import asyncio
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcollect import LLMCollector, Sampling
from llmcollect.errors import PolicyError, SpecError
from llmcollect.policies.engines import Engine
from llmcollect.tensors import StepTensorDict
from tests import tiny_model
from tests.conftest import ENGINE_ARGS
from tests.fakes import BytePolicy, CountEnv
from tests.test_examples import load

TINY_ENGINE = {name: value for name, value in ENGINE_ARGS.items() if name != "dtype"}


def rows(**changes: Any) -> Any:
    arguments = {"env": partial(CountEnv, 3), "policy": BytePolicy, "steps_per_batch": 12, "num_groups": 4}
    return LLMCollector(**(arguments | {"group_size": 2, "yields": "groups"} | changes))


def test_lazy_rows_have_their_own_lengths() -> None:
    for batch in rows():
        lazy = batch.to_torchrl()
        assert lazy.batch_size == batch.batch_size
        for row, dense in zip(lazy, batch, strict=True):
            prompt, response = int(dense["tokens", "prompt_length"]), int(dense["tokens", "response_length"])
            assert row["tokens", "prompt"].tolist() == dense["tokens", "prompt"][:prompt].tolist()
            assert row["tokens", "full"].tolist() == dense["tokens", "full"][: prompt + response].tolist()
            assert row["log_probs", "full"].tolist()[prompt:] == row["log_probs", "response"].tolist()
            assert row["masks", "all_assistant_mask"].tolist() == [False] * prompt + [True] * response
            assert row["masks", "all_attention_mask"].all()
            assert row["next", "reward"].shape == (1, 1)
            assert row["text", "response"] == dense["text", "response"]
            assert row["collector", "env"] == "CountEnv"


def test_replay_buffers_take_lazy_and_dense_rows() -> None:
    from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer

    lazy = ReplayBuffer(storage=LazyStackStorage(100), batch_size=4)
    collecting = rows(postproc=StepTensorDict.to_torchrl)
    collecting.start(replay_buffer=lazy)
    collecting.join(30)
    assert len(lazy) == 24
    assert {len(row["tokens", "full"]) for row in lazy[:]} != {24}, "of several lengths"
    assert lazy.sample().batch_size == (4,)

    def of_one_width(batch: Any) -> Any:
        """A dense storage has one width for good, and tensors alone."""
        wide = torch.nn.functional.pad(batch["tokens", "full"], (0, 200 - batch["tokens", "full"].shape[1]))
        return batch.select(("collector", "traj_ids"), ("next", "reward")).set("full", wide)

    dense = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collecting = rows(postproc=of_one_width)
    collecting.start(replay_buffer=dense)
    collecting.join(30)
    assert len(dense) == 24
    assert dense.sample()["full"].shape == (4, 200)


def test_the_advantage_is_that_of_the_group() -> None:
    from torchrl.objectives.llm import MCAdvantage

    advantage = MCAdvantage(grpo_size=2, prompt_key=("collector", "group"))
    for batch in rows(env=partial(CountEnv, 1), group_size=2):
        found = advantage.inv(batch.to_torchrl())
        assert len(found) == len(batch)
        for group in set(batch["collector", "group"].tolist()):
            rewards = batch["next", "reward"][batch["collector", "group"] == group][:, 0]
            expected = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-6)
            own = torch.stack([row["advantage"].flatten() for row in found if row["collector", "group"] == group])
            torch.testing.assert_close(own.flatten(), expected)


@pytest.mark.engine
def test_the_loss_sees_the_log_probs_that_were_sampled(tiny: Path, tiny_policy: Any, engine: Engine) -> None:
    """With the weights that sampled, every importance ratio is 1, whatever the turn of a conversation."""
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    actor = TransformersWrapper(network, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=False)
    loss = GRPOLoss(actor, entropy_bonus=False)
    advantage = MCAdvantage(grpo_size=2, prompt_key=("collector", "group"))
    seen = 0
    for batch in rows(policy=tiny_policy, sampling=Sampling(max_tokens=12)):
        out = loss(advantage.inv(batch.to_torchrl()))
        assert abs(float(out.kl_approx)) < 1e-4
        assert float(out.ESS) == pytest.approx(1, abs=1e-3)
        assert float(out.clip_fraction) == 0
        seen += len(batch)
    assert seen == 24


@pytest.mark.engine
def test_the_reward_of_the_grpo_example_rises(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = load("grpo").main(str(tiny), updates=14, lr=5e-3, **TINY_ENGINE)
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards
    assert capsys.readouterr().out.count("update ") == 14


@pytest.mark.engine
def test_weights_are_updated_while_requests_are_in_flight(tiny: Path, tmp_path: Path) -> None:
    from llmcollect.policies import VLLMPolicy

    other = tiny_model.make_model(tmp_path / "other", seed=1)
    shutil.copytree(tiny, tmp_path / "model")
    collecting = rows(
        policy=partial(VLLMPolicy, str(tmp_path / "model"), **ENGINE_ARGS),
        num_groups=None,
        yields="steps",
        sampling=Sampling(max_tokens=32),
    )
    with collecting:
        assert set(next(collecting)["tokens", "policy_version"].unique().tolist()) <= {-1, 0}
        assert collecting.update_weights(other) == 1
        with pytest.raises(SpecError, match="version must be greater than 1"):
            collecting.update_weights(other, 1)
        with pytest.raises(PolicyError, match="no folder with"):
            collecting.update_weights(tmp_path / "nowhere")
        assert collecting.update_weights(str(tiny), 7) == 7
        assert collecting.update_weights(other) == 8
        batches = [next(collecting)]
        while batches[-1]["tokens", "policy_version"].max() < 8 or len(batches) < 20:
            batches.append(next(collecting))
    checked = sampled_by({0: tiny, 1: other, 7: tiny, 8: other}, batches)
    assert checked[8] > 100


def sampled_by(folders: dict[int, Path], batches: list[Any]) -> Counter[int]:
    """Check each token's log-prob against the weights that its version names; how many of each there are."""
    from transformers import AutoModelForCausalLM

    networks = {v: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for v, f in folders.items()}
    counts: Counter[int] = Counter()
    for row in torch.cat(batches):
        prompt, response = int(row["tokens", "prompt_length"]), int(row["tokens", "response_length"])
        full = row["tokens", "full"][None, : prompt + response]
        versions = row["tokens", "policy_version"][:response]
        own = row["log_probs", "response"][:response]
        for version in set(versions.tolist()):
            with torch.no_grad():
                logits = networks[version](full).logits[0, prompt - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, full[0, prompt:, None])[:, 0]
            of = versions == version
            torch.testing.assert_close(logprobs[of], own[of], atol=1e-3, rtol=0, msg=f"{version} in {versions}")
            counts[version] += int(of.sum())
    return counts


def test_a_policy_without_other_weights_says_so(tmp_path: Path) -> None:
    with rows(num_groups=None) as collecting, pytest.raises(SpecError, match="cannot take other weights"):
        collecting.update_weights(tmp_path)
    with pytest.raises(SpecError, match="has ended"):
        collecting.update_weights(tmp_path)
    several = rows(policy=[BytePolicy, partial(BytePolicy, tokens=3)])
    with pytest.raises(SpecError, match="several policies"):
        several.update_weights(tmp_path)
    with pytest.raises(SpecError, match="there is no policy 'x'"):
        several.update_weights(tmp_path, policy="x")


def test_postproc_is_called_with_each_batch_and_not_with_its_end() -> None:
    seen: list[int] = []

    def count(batch: Any) -> Any:
        seen.append(len(batch))
        return batch.select(("next", "reward"))

    batches = list(rows(postproc=count))
    assert [len(batch) for batch in batches] == seen
    assert list(batches[0].keys(True, True)) == [("next", "reward")]

    async def read() -> list[Any]:
        return [batch async for batch in rows(postproc=count)]

    assert sum(map(len, asyncio.run(read()))) == 24
