"""Constructors become import paths with kwargs, or an error that says what to do instead."""

from functools import partial

import pytest

from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.envs import ReasoningGymEnv
from llmcollect.errors import SpecError
from tests.fakes import CountEnv


def test_a_partial_becomes_a_path_with_named_arguments() -> None:
    made = ComponentSpec.of(partial(ReasoningGymEnv, "gcd", max_value=12))
    assert made.target == "llmcollect.envs:ReasoningGymEnv"
    assert made.kwargs == {"dataset": "gcd", "max_value": 12}
    assert made.label == "ReasoningGymEnv:gcd"


def test_nested_partials_a_class_and_a_path_are_the_same() -> None:
    nested = ComponentSpec.of(partial(partial(CountEnv, 3), text="q"))
    assert nested == ComponentSpec(target="tests.fakes:CountEnv", kwargs={"turns": 3, "text": "q"})
    assert ComponentSpec.of(CountEnv) == ComponentSpec.of("tests.fakes:CountEnv")
    assert isinstance(nested.build(), CountEnv)


def test_a_weight_is_kept() -> None:
    assert EnvSpec.of(CountEnv, weight=2.0).weight == 2.0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no.such.module:Env", "cannot import"),
        ("tests.fakes:NoEnv", "has no 'NoEnv'"),
        ("tests.fakes:END", "not callable"),
        (partial(CountEnv, tuns=2), "unexpected keyword argument 'tuns'"),
        (partial(CountEnv, 1, 2, 3, 4), "by keyword"),
        (CountEnv(), "instance of CountEnv"),
    ],
)
def test_what_cannot_be_built_is_named(source: object, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        ComponentSpec.of(source).constructor()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [lambda: CountEnv(), partial(CountEnv, text=object())])
def test_what_cannot_be_written_down_says_what_to_do(source: object) -> None:
    made = ComponentSpec.of(source)
    assert callable(made.constructor())
    with pytest.raises(SpecError, match=r"define a class or function|let the constructor make"):
        made.require_stable("a run with a root")
