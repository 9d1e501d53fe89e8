"""Hypothesis strategies for trajectories as a rollout may leave them."""

import json

from hypothesis import strategies as st

from llmcollect.types import Step, Trajectory

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
# Not lone surrogates: canonical_json and tokenizers never give any.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
times = st.integers(0, 2**50)


@st.composite
def steps(draw: st.DrawFn, number: int) -> Step:
    response = draw(ids)
    cut = draw(st.integers(0, len(response)))
    first, second = draw(st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True))
    spans = [(version, n) for version, n in ((first, cut), (second, len(response) - cut)) if n]
    floats = st.floats(width=32, allow_nan=False) | st.just(float("-inf"))
    return Step(
        step=number,
        prompt_ids=draw(ids.filter(bool)),
        context_reset=number > 0 and draw(st.booleans()),
        response_ids=response,
        response_logprobs=draw(st.none() | st.lists(floats, min_size=len(response), max_size=len(response))),
        policy_versions=spans,
        messages="[]",
        response_text=draw(texts),
        observation=draw(st.none() | texts.map(lambda text: json.dumps([{"role": "user", "content": text}]))),
        reward=draw(st.none() | st.floats()),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        stop_reason=draw(st.none() | texts),
        info=draw(st.none() | texts.map(json.dumps)),
        seed=draw(st.integers(0, 2**32 - 1)),
        started_at=draw(times),
        generated_at=draw(times),
        finished_at=draw(times),
    )


@st.composite
def trajectories(draw: st.DrawFn, number: int) -> Trajectory:
    made = [draw(steps(k)) for k in range(draw(st.integers(1, 4)))]
    last = made[-1]
    match draw(st.sampled_from(["terminated", "truncated", "failed late", "failed early"])):
        case "terminated":
            last.terminated = True
        case "truncated":
            last.truncated = True
        case "failed late":
            last.failure = '{"message":"x"}'
            last.response_ids = last.response_logprobs = last.policy_versions = last.generated_at = None
        case "failed early":
            made = [Step(step=-1, failure='{"message":"x"}', started_at=1, finished_at=2)]
    return Trajectory(
        trajectory=number,
        group=number // 2,
        sample=number % 2,
        env=draw(st.sampled_from(["a", "b"])),
        task_index=draw(st.integers(0, 2**40)),
        policy="p",
        attempt=draw(st.integers(0, 3)),
        task=json.dumps({"index": number}),
        steps=made,
    )


runs = st.integers(1, 5).flatmap(lambda count: st.tuples(*(trajectories(number) for number in range(count)))).map(list)
