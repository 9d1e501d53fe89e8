"""What collecting costs a real engine: tokens/s through the collector over tokens/s of the bare engine.

    python -m benchmarks.engine [--trajectories 2048] [--repeats 3]

A tiny random model on vLLM, 64 in flight; the same prompts, seeds and sampling for both; one engine serves both,
and the collector commits to a local folder. `ratio` is the median of the repeats' ratios.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.simulated import InstantEnv, drain
from llmcollect import Limits, LLMCollector, Sampling
from llmcollect.components import ComponentSpec
from llmcollect.policies import VLLMPolicy
from llmcollect.policies.engines import engine_thread
from llmcollect.run import RunSpec, plan_groups
from llmcollect.types import Completion, Observation, Task, Transition
from tests.tiny_model import make_model

IN_FLIGHT, MAX_TOKENS, PARTS = 64, 64, 4


class OneTurnEnv(InstantEnv):
    """A question of its own for each task, and an answer that ends it."""

    async def reset(self, task: Task) -> Observation:
        return Observation.user(question(task))

    async def step(self, completion: Completion) -> Transition:
        return Transition(reward=float(len(completion.token_ids)), terminated=True)


def question(task: Task) -> str:
    """What the env of a task asks."""
    return f"Question {task.index}: what comes after {task.seed}?"


async def bare(policy: Any, spec: RunSpec) -> tuple[int, float]:
    """Tokens and seconds of vLLM's AsyncLLM alone, with as many requests in flight."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ends = policy.end_ids
    plans = [plan for group in plan_groups(spec) for plan in group.trajectories]
    prompts = []
    for plan in plans:
        ids, _ = policy.conversation().prompt([{"role": "user", "content": question(plan.task)}])
        prompts.append(ids)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(index: int) -> int:
        async with slots:
            seed = plans[index].step_seed(0)
            params = SamplingParams(
                max_tokens=MAX_TOKENS,
                stop_token_ids=ends,
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": prompts[index]}
            outputs = [output async for output in policy.engine.generate(prompt, params, f"bare-{index}")]
            return len(outputs[-1].outputs[0].token_ids)

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, range(len(plans)))))
    return tokens, time.perf_counter() - start


def collected(policy: Any, spec: RunSpec, root: str) -> tuple[int, float]:
    """Tokens and seconds through the collector."""
    collector = LLMCollector(
        env=OneTurnEnv,
        policy=policy,
        num_groups=spec.num_groups,
        steps_per_batch=256,
        root=root,
        sampling=spec.sampling,
        limits=spec.limits,
    )
    return drain(collector, lambda batch: int(batch["tokens", "response_length"].sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread gives a model this small nothing
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny")
        policy = partial(VLLMPolicy, str(model), max_model_len=512, max_num_seqs=IN_FLIGHT)
        collect = partial(collected, policy)
        spec = RunSpec.parse(
            {
                "envs": [{"target": "benchmarks.engine:OneTurnEnv"}],
                "policies": [{"target": "llmcollect.policies:VLLMPolicy", "kwargs": {"model": str(model)}}],
                "num_groups": options.trajectories,
                "sampling": Sampling(max_tokens=MAX_TOKENS).model_dump(),
                "limits": Limits(concurrency=IN_FLIGHT).model_dump(),
            }
        )
        ratios = engine_thread().submit(measure(policy, spec, collect, folder, options.repeats)).result()
    print(json.dumps({"ratio": statistics.median(ratios), "ratios": ratios}))


async def measure(policy: Any, spec: RunSpec, collect: Any, folder: str, repeats: int) -> list[float]:
    """Both in turn while this lease keeps the engine up; each repeat in parts, so that what else the machine does
    falls on both alike."""
    part = spec.model_copy(update={"num_groups": (spec.num_groups or PARTS) // PARTS})
    ratios = []
    async with engine_thread().lease(ComponentSpec.of(policy), IN_FLIGHT) as engine:
        seconds = {"bare": 0.0, "collected": 0.0}
        tokens = {"bare": 0, "collected": 0}

        async def one(name: str, number: int) -> None:
            if name == "bare":
                count, took = await bare(engine.policy, part)
            else:
                count, took = await asyncio.to_thread(collect, part, f"{folder}/run-{number}")
            tokens[name] += count
            seconds[name] += took

        await one("bare", -2)
        await one("collected", -1)
        for repeat in range(repeats):
            seconds.update(bare=0.0, collected=0.0)
            tokens.update(bare=0, collected=0)
            for number in range(PARTS):
                order = ("bare", "collected") if number % 2 else ("collected", "bare")
                for name in order:
                    await one(name, repeat * PARTS + number)
            rate = {name: tokens[name] / seconds[name] for name in tokens}
            ratios.append(rate["collected"] / rate["bare"])
            print(f"bare {rate['bare']:,.0f} tokens/s, collected {rate['collected']:,.0f} tokens/s")
    return ratios


if __name__ == "__main__":
    main()
