"""The real engine: exact tokens, log-probs of the sampled distribution, and clear refusals."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from llmcollect import Limits, LLMCollector, Sampling, StepBatch, open_run
from llmcollect.errors import PolicyError, SpecError
from llmcollect.policies import VLLMPolicy
from tests import tiny_model
from tests.conftest import ENGINE_ARGS
from tests.fakes import CountEnv

SAMPLING = Sampling(max_tokens=24, temperature=0.7)


def collector(policy: Any, **changes: Any) -> LLMCollector:
    arguments: dict[str, Any] = {
        "env": partial(CountEnv, 3),
        "num_groups": 4,
        "group_size": 2,
        "steps_per_batch": 7,
        "sampling": SAMPLING,
    }
    return LLMCollector(policy=policy, **(arguments | changes))


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_live_rows_equal_stored_rows_token_for_token(tiny_policy: Any, tmp_path: Path) -> None:
    live = torch.cat(list(collector(tiny_policy, root=tmp_path)))
    stored = torch.cat([batch.to_tensordict() for batch in open_run(tmp_path).steps()])
    order = [
        torch.tensor(np.lexsort((batch["collector", "step"], batch["collector", "traj_ids"])))
        for batch in (live, stored)
    ]
    for key in (("tokens", "full"), ("tokens", "response"), ("log_probs", "response"), ("tokens", "prompt_length")):
        assert torch.equal(live[key][order[0]], stored[key][order[1]])
    assert len(live) == 24


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_prompts_are_the_template_and_then_only_what_is_between_turns(tiny_policy: Any, tokenizer: Any) -> None:
    rows = [row for batch in collector(tiny_policy) for row in StepBatch.from_tensordict(batch).to_arrow().to_pylist()]
    end = tokenizer.eos_token_id
    last: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["trajectory"], row["step"])):
        user = json.loads(row["messages"])
        if row["step"] == 0:
            expected = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
        else:
            ended = bool(last[row["trajectory"]]) and last[row["trajectory"]][-1] == end
            text = f"\n<|im_start|>user\n{3 - row['step']} left<|im_end|>\n<|im_start|>assistant\n"
            expected = ([] if ended else [end]) + tokenizer.encode(text, add_special_tokens=False)
        assert row["prompt_ids"] == list(expected)
        last[row["trajectory"]] = row["response_ids"]
        assert len(row["response_ids"]) == len(row["response_logprobs"]) <= 24
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == end else "length")


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_logprobs_are_those_of_the_distribution_that_was_sampled(tiny_policy: Any, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    batch = torch.cat(list(collector(tiny_policy)))
    for row in batch.unbind(0):
        start, count = int(row["tokens", "prompt_length"]), int(row["tokens", "response_length"])
        ids = row["tokens", "full"][: start + count]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, start - 1 : -1].float() / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(-1, ids[start:, None])[:, 0]
        torch.testing.assert_close(row["log_probs", "response"][:count], expected, atol=1e-2, rtol=0)


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_tokens_do_not_depend_on_what_else_runs(tiny_policy: Any) -> None:
    outcomes = []
    for concurrency in (1, 64):
        batch = torch.cat(list(collector(tiny_policy, limits=Limits(concurrency=concurrency))))
        order = torch.tensor(np.lexsort((batch["collector", "step"], batch["collector", "traj_ids"])))
        outcomes.append(batch["tokens", "full"][order])
    assert torch.equal(*outcomes)
    assert len({tuple(row.tolist()) for row in outcomes[0]}) == 24


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_a_prompt_longer_than_the_context_fails_alone(tiny_policy: Any, tmp_path: Path) -> None:
    long = partial(CountEnv, 1, text="x" * tiny_model.MAX_CONTEXT)
    batches = list(collector(tiny_policy, env=[partial(CountEnv, 1), long], num_groups=8, root=tmp_path))
    assert {env for batch in batches for env in batch["collector", "env"]} == {"CountEnv"}
    failed = [t for t in open_run(tmp_path).trajectories(include_failed=True) if t.failure]
    assert len(failed) == 8
    assert all("the model's context holds 512" in t.failure["message"] for t in failed if t.failure)


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_many_long_prompts_at_once_do_not_end_the_engine(tiny_policy: Any) -> None:
    """64 seeded requests with more prompt tokens than one step of the engine takes."""
    env = partial(CountEnv, 1, text="a long question " * 25)
    batches = list(collector(tiny_policy, env=env, num_groups=128, group_size=1, sampling=Sampling(max_tokens=4)))
    assert sum(len(batch) for batch in batches) == 128


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_a_stop_string_ends_a_response(tiny_policy: Any) -> None:
    sampling = Sampling(max_tokens=200, temperature=1.5, stop=("a", "e", "i", "o", "u"))
    batch = torch.cat(list(collector(tiny_policy, env=partial(CountEnv, 1), num_groups=16, sampling=sampling)))
    reasons = set(batch["text", "stop_reason"])
    assert reasons & set("aeiou")


def test_a_model_that_does_not_exist_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"there is no model .*pass a folder that exists"):
        collector(partial(VLLMPolicy, str(tmp_path / "nowhere")))


@pytest.mark.engine
def test_an_unknown_engine_argument_is_named(tiny: Path) -> None:
    with pytest.raises(SpecError, match=r"no engine argument .*; did you mean 'tensor_parallel_size'"):
        next(collector(partial(VLLMPolicy, str(tiny), tensor_paralel_size=2)))


@pytest.mark.engine
def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PolicyError) as caught:
        next(collector(partial(VLLMPolicy, str(tmp_path))))
    assert "\n" not in str(caught.value)


def test_fingerprints_tell_checkpoints_of_one_shape_apart(tmp_path: Path) -> None:
    first, same, other = (
        tiny_model.make_model(tmp_path / name / "model", seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    marks = [VLLMPolicy(str(folder)).fingerprint() for folder in (first, same, other)]
    assert marks[0] == marks[1] != marks[2]
    assert VLLMPolicy(str(first), max_model_len=64).fingerprint() == marks[0], "engine arguments are not the model"
    assert VLLMPolicy("org/model", revision="main").fingerprint() == "org/model@main"


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_nothing_is_lost(tiny: Path, tmp_path: Path) -> None:
    """kill -9 of vLLM's own process while requests are in flight."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    policy = partial(VLLMPolicy, str(tiny), **ENGINE_ARGS, max_model_len=500)  # not the session's engine
    collecting = collector(policy, num_groups=200, root=tmp_path, limits=Limits(concurrency=8, commit_rows=8))
    seen = [next(collecting)]
    engines = [p for p in psutil.Process().children(recursive=True) if p.pid not in before and "Engine" in p.name()]
    assert len(engines) == 1
    engines[0].kill()
    seen += list(collecting)
    whole = torch.cat(seen)
    steps = set(zip(whole["collector", "traj_ids"].tolist(), whole["collector", "step"].tolist(), strict=True))
    assert len(steps) == len(whole) == 1200
    assert {record.complete for record in open_run(tmp_path).group_records()} == {True}
    attempts = [attempt for commit in open_run(tmp_path).commits() for attempt in commit.failed_attempts]
    assert {attempt["type"] for attempt in attempts} == {"EngineDeadError"}


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_leaves_the_applications_logging_alone(tiny: Path, tmp_path: Path) -> None:
    """A handler that is flushed under logging's lock, and waits for a thread that logs, would never come back."""
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, sys\n"
        "from functools import partial\n"
        "from llmcollect import LLMCollector, Sampling\n"
        "from llmcollect.policies import VLLMPolicy\n"
        "from tests.fakes import CountEnv\n"
        "class Handler(logging.Handler):\n"
        "    def flush(self): print('flushed')\n"
        "    def close(self): print('closed')\n"
        "    def emit(self, record): print(record.getMessage())\n"
        "if __name__ == '__main__':\n"
        "    logging.getLogger('application').addHandler(Handler())\n"
        f"    policy, sampling = partial(VLLMPolicy, sys.argv[1], **{ENGINE_ARGS}), Sampling(max_tokens=4)\n"
        "    env = partial(CountEnv, 1)\n"
        "    with LLMCollector(env, policy, steps_per_batch=1, num_groups=1, sampling=sampling) as batches:\n"
        "        print(sum(len(batch) for batch in batches))\n"
        "    logging.getLogger('application').error('heard', stack_info=False)\n"
        "    logging.getLogger('application').handlers.clear()\n"
        "    print('end', flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), str(tiny)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.split()[:3], done.stderr) == (0, ["1", "heard", "end"], "")
