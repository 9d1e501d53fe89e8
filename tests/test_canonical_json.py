"""Anything becomes JSON text, the same for the same value, and plain JSON values come back."""

import datetime
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcollect import canonical_json

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    text = canonical_json.dumps(value)
    assert json.loads(text) == value
    text.encode()


@given(st.dictionaries(st.text(max_size=4), plain, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any]) -> None:
    assert canonical_json.dumps(dict(reversed(value.items()))) == canonical_json.dumps(value)


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attribute for you")

    def __repr__(self) -> str:
        raise RuntimeError("no repr for you")


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor([[1.5]]), [[1.5]]),
        (b"\x00\xff", {"base64": "AP8="}),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: "a", (2, 3): "b"}, {"1": "a", "(2, 3)": "b"}),
        ({"a": 1, 2: 3}, {"a": 1, "2": 3}),
        ("\ud800", "\ud800"),
        ((1, (2,)), [1, [2]]),
    ],
)
def test_other_values_have_a_defined_form(value: Any, expected: Any) -> None:
    text = canonical_json.dumps({"x": value})
    assert json.loads(text) == {"x": expected}
    text.encode()


def test_not_a_number_is_kept() -> None:
    assert math.isnan(json.loads(canonical_json.dumps(float("nan"))))
    assert json.loads(canonical_json.dumps(-math.inf)) == -math.inf


@pytest.mark.parametrize("value", [object(), sys.stderr, Hostile(), cycle, lambda: 0], ids=type)
def test_nothing_makes_it_raise(value: Any) -> None:
    assert json.loads(canonical_json.dumps({"bad": value, "good": 1}))["good"] == 1
