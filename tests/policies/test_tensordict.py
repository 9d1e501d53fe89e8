"""Callables as policies: batches, log-probs, failures of a batch alone."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from llmcollect import Limits, LLMCollector, Sampling, StepBatch
from llmcollect.errors import PolicyError, PromptTooLongError, SpecError
from llmcollect.policies import TensorDictPolicy
from llmcollect.types import Generation
from tests.fakes import CountEnv

END = 258  # <|im_end|> of the tiny model
PAD = 259


class Letters:
    """Answers each prompt with as many letters as it is told, END and padding after them; notes what it was given.

    Args:
        fail: Numbers of the calls that raise.
    """

    sizes: list[int]

    def __init__(self, fail: tuple[int, ...] = (), delay_s: float = 0.0, version: int | None = None) -> None:
        self._fail, self._delay_s, self._version = fail, delay_s, version
        self.running = 0
        Letters.sizes = []

    def __call__(self, batch: Any) -> Any:
        Letters.sizes.append(len(batch))
        assert threading.current_thread().name.startswith("llmcollect forward")
        self.running += 1
        assert self.running == 1, "one at a time"
        time.sleep(self._delay_s)
        self.running -= 1
        if len(Letters.sizes) - 1 in self._fail:
            raise RuntimeError("out of\nmemory")
        padded = batch.get(("tokens", "prompt"), as_padded_tensor=True, padding_side="left", padding_value=PAD)
        mask = batch.get(("masks", "all_attention_mask"), as_padded_tensor=True, padding_side="left")
        assert torch.equal(mask, padded != PAD)
        ids = torch.full((len(batch), 5), PAD)
        for row, length in zip(ids, mask.sum(1).tolist(), strict=True):
            row[: length % 4] = 65 + length % 26
            row[length % 4] = END
        out = TensorDict({("tokens", "response"): ids, ("log_probs", "response"): -ids / 100}, batch_size=[len(batch)])
        if self._version is not None:
            out["policy", "version"] = torch.full((len(batch),), self._version)
        return out


def transformers_wrapper(folder: str, pad_output: bool = False, seen: Any = None, **generate: Any) -> Any:
    from torchrl.modules.llm.policies import TransformersWrapper
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wrapper = TransformersWrapper(
        AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        input_mode="tokens",
        generate=True,
        pad_output=pad_output,
        generate_kwargs={"max_new_tokens": 12, "do_sample": False, **generate},
    )
    if seen is not None:
        wrapper.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return wrapper


def with_policy(policy: TensorDictPolicy, use: Callable[[TensorDictPolicy], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        await policy.start()
        try:
            return await use(policy)
        finally:
            await policy.close()

    return asyncio.run(go())


def ask(policy: TensorDictPolicy, prompt: list[int]) -> "asyncio.Task[Generation]":
    return asyncio.ensure_future(policy.generate(prompt, Sampling(), 0, "one"))


def collect(policy: Any, **options: Any) -> list[dict[str, Any]]:
    collector = LLMCollector(
        env=partial(CountEnv, 2), policy=policy, num_groups=8, group_size=2, steps_per_batch=8, **options
    )
    return [row for batch in collector for row in StepBatch.from_tensordict(batch).to_arrow().to_pylist()]


@pytest.mark.parametrize("pad_output", [False, True])
def test_transformers_wrapper_collects_in_batches(tiny: Path, pad_output: bool) -> None:
    pytest.importorskip("torchrl")
    seen: list[int] = []
    wrapper = partial(transformers_wrapper, str(tiny), pad_output, seen)
    rows = collect(partial(TensorDictPolicy, wrapper, max_batch=6, max_wait_s=0.1, fingerprint="tiny"))
    assert len(rows) == 32
    assert sum(seen) == 32
    assert 1 < max(seen) <= 6
    direct = transformers_wrapper(str(tiny), pad_output)
    context: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["trajectory"], row["step"])):
        prompt = context.setdefault(row["trajectory"], [])
        prompt += row["prompt_ids"]
        alone = direct(TensorDict({("tokens", "prompt"): torch.tensor([prompt])}, batch_size=[1]))[0]
        assert row["response_ids"] == alone["tokens", "response"].tolist()
        assert row["response_logprobs"] == pytest.approx(alone["log_probs", "response"].tolist(), abs=1e-4)
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == END else "length")
        prompt += row["response_ids"]


def test_a_plain_callable_is_a_policy(tokenizer: Any) -> None:
    rows = collect(partial(TensorDictPolicy, Letters, tokenizer=tokenizer, max_context=500, version=7, max_batch=4))
    assert len(rows) == 32
    assert 1 < max(Letters.sizes) <= 4
    for row in rows:
        ids = row["response_ids"]
        assert ids[-1] == END
        assert ids.count(END) == 1
        assert PAD not in ids
        assert row["response_logprobs"] == pytest.approx([-i / 100 for i in ids])
        assert row["finish_reason"] == "stop"
        assert row["policy_versions"] == [{"version": 7, "count": len(ids)}]


def test_a_batch_that_fails_costs_its_own_trajectories_a_try(tokenizer: Any) -> None:
    policy = partial(TensorDictPolicy, Letters, tokenizer=tokenizer, max_context=500, fail=(1,), max_batch=4)
    rows = collect(policy, limits=Limits(max_attempts=2))
    assert {row["failure"] for row in rows} == {None}
    again = {row["trajectory"] for row in rows if row["attempt"] == 1}
    assert len(again) == Letters.sizes[1]
    assert len(rows) == 32


def test_requests_wait_for_each_other_and_for_no_more_than_fit(tokenizer: Any) -> None:
    async def use(policy: TensorDictPolicy) -> None:
        first = [ask(policy, [1] * n) for n in range(1, 8)]
        await asyncio.sleep(0.02)
        gone, kept = ask(policy, [1, 2, 3]), ask(policy, [1, 2])
        gone.cancel()
        await asyncio.gather(*first, kept)
        assert Letters.sizes == [3, 3, 2], "what was cancelled is not asked for"
        began = time.monotonic()
        await ask(policy, [1])
        assert time.monotonic() - began >= 0.1

    with_policy(TensorDictPolicy(Letters, tokenizer=tokenizer, max_context=99, max_batch=3, max_wait_s=0.1), use)


def test_the_loop_goes_on_while_the_model_works(tokenizer: Any) -> None:
    async def use(policy: TensorDictPolicy) -> None:
        request, ticks = ask(policy, [1]), 0
        while not request.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10

    with_policy(TensorDictPolicy(Letters, tokenizer=tokenizer, max_context=99, delay_s=0.5), use)


def test_errors_are_one_line_and_the_next_batch_goes_on(tokenizer: Any) -> None:
    async def use(policy: TensorDictPolicy) -> None:
        with pytest.raises(PolicyError, match=r"^RuntimeError: out of memory$"):
            await ask(policy, [1])
        assert (await ask(policy, [1])).finish_reason == "stop"
        with pytest.raises(PromptTooLongError, match="9 tokens and the model's context holds 9"):
            await ask(policy, [1] * 9)

    with_policy(TensorDictPolicy(Letters, tokenizer=tokenizer, max_context=9, fail=(0,)), use)


def test_closing_fails_what_waits(tokenizer: Any) -> None:
    async def go() -> None:
        policy = TensorDictPolicy(Letters, tokenizer=tokenizer, max_context=9, delay_s=0.2, max_batch=1)
        await policy.start()
        running, waiting = ask(policy, [1]), ask(policy, [2])
        await asyncio.sleep(0.1)
        await policy.close()
        for request in (running, waiting, ask(policy, [3])):
            with pytest.raises(PolicyError, match="closed"):
                await request

    asyncio.run(go())


def answer(**entries: Any) -> Any:
    def respond(batch: Any) -> Any:
        return TensorDict({key.replace("_of_", "."): value for key, value in entries.items()}, [1]).unflatten_keys(".")

    return respond


ids = torch.tensor([[5, 6, PAD]])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"other": ids}, r"no \('tokens', 'response'\)"),
        ({"tokens_of_response": ids, "log_probs_of_response": ids[:, 1:]}, "3 ids in a response and 2 log-probs"),
        ({"tokens_of_response": ids, "policy_version": ["a-uuid"]}, "must be an integer; got 'a-uuid'"),
    ],
)
def test_what_a_callable_must_not_give(tokenizer: Any, entries: dict[str, Any], words: str) -> None:
    async def use(policy: TensorDictPolicy) -> None:
        with pytest.raises(PolicyError, match=words):
            await ask(policy, [1])

    with_policy(TensorDictPolicy(answer, tokenizer=tokenizer, max_context=9, **entries), use)


def test_log_probs_and_an_end_are_not_required(tokenizer: Any) -> None:
    async def use(policy: TensorDictPolicy) -> Generation:
        return await ask(policy, [1])

    policy = TensorDictPolicy(answer, tokenizer=lambda: tokenizer, max_context=9, tokens_of_response=ids)
    assert with_policy(policy, use) == Generation([5, 6], None, [(0, 2)], "length")


def test_a_result_of_another_size_is_refused(tokenizer: Any) -> None:
    async def use(policy: TensorDictPolicy) -> None:
        both = await asyncio.gather(ask(policy, [1]), ask(policy, [2]), return_exceptions=True)
        assert [str(error) for error in both] == [
            "the callable must give a TensorDict of batch size [2]; got one of batch size [1]"
        ] * 2

    with_policy(TensorDictPolicy(answer, tokenizer=tokenizer, max_context=9, tokens_of_response=ids), use)


def test_sampling_that_is_not_applied_is_said(tokenizer: Any) -> None:
    async def use(policy: TensorDictPolicy) -> None:
        with pytest.warns(UserWarning, match=r"Letters samples as it was told .*max_tokens=3.* is not applied"):
            await policy.generate([1], Sampling(max_tokens=3), 0, "one")

    with_policy(TensorDictPolicy(Letters, tokenizer=tokenizer, max_context=9), use)


def broken() -> Any:
    raise OSError("no\nweights")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"constructor": broken}, "test_tensordict:broken could not be made: OSError: no weights"),
        ({"constructor": Letters}, "has no tokenizer: pass tokenizer="),
        ({"constructor": list}, "made a list, which is not callable"),
    ],
)
def test_what_cannot_start(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        asyncio.run(TensorDictPolicy(**arguments).start())


def test_the_length_of_a_context_is_found_or_asked_for(tiny: Path, tokenizer: Any) -> None:
    pytest.importorskip("torchrl")
    policy = TensorDictPolicy(transformers_wrapper, folder=str(tiny))

    async def use(policy: TensorDictPolicy) -> int:
        return policy.max_context

    assert with_policy(policy, use) == 512
    with pytest.raises(PolicyError, match="pass max_context="):
        asyncio.run(TensorDictPolicy(Letters, tokenizer=tokenizer).start())


def test_the_fingerprint_names_constructor_and_kwargs(tiny: Path) -> None:
    policy = TensorDictPolicy("tests.policies.test_tensordict:transformers_wrapper", folder="m", max_batch=2)
    assert policy.fingerprint() == 'tests.policies.test_tensordict:transformers_wrapper({"folder": "m"})'
    assert TensorDictPolicy(Letters, fingerprint="mine").fingerprint() == "mine"
    with pytest.raises(SpecError, match="pass fingerprint="):
        TensorDictPolicy(Letters, delay_s=object()).fingerprint()
    with pytest.raises(SpecError, match="max_batch must be at least 1"):
        TensorDictPolicy(Letters, max_batch=0)
