"""ReasoningGymEnv asks what the seed says and scores as the task does."""

from functools import partial
from typing import Any

import pytest

from llmcollect.envs import ReasoningGymEnv
from llmcollect.errors import SpecError
from llmcollect.types import Completion, Task

gcd = partial(ReasoningGymEnv, "gcd", min_value=2, max_value=12)


def answer(env: ReasoningGymEnv, text: str) -> float | None:
    transition = env.step(Completion(text, {"role": "assistant", "content": text}, [], "stop"))
    assert transition.terminated
    return transition.reward


def test_a_task_is_its_seed() -> None:
    first, second, third = (gcd().reset(Task(0, seed)) for seed in (5, 5, 6))
    assert first == second
    assert first != third
    assert first.info["dataset"] == "gcd"


def test_the_last_number_is_the_answer() -> None:
    env = gcd()
    right = env.reset(Task(0, 5)).info["answer"]
    assert answer(env, f"Of 4 and 6 it is 99, no, {right}.") == 1.0
    assert answer(env, "I do not know") == 0.0
    assert answer(env, f"<answer>{right}</answer> and not 7") == 1.0


@pytest.mark.parametrize(
    ("extract", "text", "found"),
    [
        ("number", "<answer>5</answer> 6", "6"),
        ("number", "-3,000.5 and so on", "-3,000.5"),
        ("tag", "6", None),
        ("tag", "<answer> a </answer>", "a"),
        ("text", " all of it 3 ", "all of it 3"),
    ],
)
def test_where_the_answer_is_can_be_said(extract: Any, text: str, found: str | None) -> None:
    assert gcd(extract=extract).find_answer(text) == found


def test_a_system_message_and_a_suffix_are_added() -> None:
    messages = gcd(system="Be brief.", suffix=" Now!").reset(Task(0, 1)).messages
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[1]["content"].endswith(" Now!")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gcdx", {}), "gcdx"),
        (("gcd", {"max_valu": 3}), "unexpected keyword argument 'max_valu'"),
        (("gcd", {"max_value": -1}), "max_value"),
        (("gcd", {"extract": "magic"}), "got 'magic'"),
    ],
)
def test_bad_settings_are_named(arguments: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ReasoningGymEnv(arguments[0], **arguments[1])
