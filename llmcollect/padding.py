"""Rows of any length into dense arrays padded on the right: loops that numba compiles when this is imported.

That takes two seconds on a machine where it has not been done, and half a second where it has. A list column comes as
the values of all its lists end to end, and where each list starts among them, and the last one ends.

Whatever lengths a file claims, nothing is read or written outside of the arrays: slices end where their array does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import types

_Ints = npt.NDArray[np.int64]
_F = TypeVar("_F", bound=Callable[..., Any])


def _column(kind: Any) -> Any:
    return types.Array(kind, 1, "C", readonly=True)


def _padded(kind: Any) -> Any:
    return types.Array(kind, 2, "C")


def _compiled(*arguments: Any) -> Callable[[_F], _F]:
    """Of a function machine code for arguments of these types, which runs without the GIL and is kept on disk."""
    signature = types.void(*arguments)

    def compiled(function: _F) -> _F:
        try:
            made: _F = numba.njit(signature, nogil=True, cache=True)(function)
        except Exception:  # noqa: BLE001 - no folder that can be written, no space, a torn file: without the disk then
            made = numba.njit(signature, nogil=True)(function)
        return made

    return compiled


# Loops, and not `to[:] = of`: of these LLVM makes vector instructions.
@numba.njit
def _copy(to: npt.NDArray[Any], of: npt.NDArray[Any]) -> None:
    for place in range(min(to.size, of.size)):
        to[place] = of[place]


@numba.njit
def _fill(to: npt.NDArray[Any], value: Any) -> None:
    for place in range(to.size):
        to[place] = value


@_compiled(
    *[_column(types.int64)] * 2,
    *[_column(types.int64), _column(types.int32)] * 2,
    *[_padded(types.int64)] * 3,
)
def pad_tokens(
    rows: _Ints,
    first: _Ints,
    prompt_starts: _Ints,
    prompts: npt.NDArray[np.int32],
    response_starts: _Ints,
    responses: npt.NDArray[np.int32],
    prompt: _Ints,
    response: _Ints,
    full: _Ints,
) -> None:
    """The ids of rows, with contexts that begin at the rows `first`, into [B, P], [B, R] and [B, F]."""
    for index in range(rows.size):
        own, ids, end = rows[index], full[index], 0
        for row in range(first[index], own + 1):
            new = prompts[prompt_starts[row] : prompt_starts[row + 1]]
            _copy(ids[end:], new)
            end += new.size
            if row < own:
                sampled = responses[response_starts[row] : response_starts[row + 1]]
                _copy(ids[end:], sampled)
                end += sampled.size
        _copy(prompt[index], ids[:end])
        _fill(prompt[index, end:], 0)
        sampled = responses[response_starts[own] : response_starts[own + 1]]
        _copy(response[index], sampled)
        _fill(response[index, sampled.size :], 0)
        _copy(ids[end:], sampled)
        _fill(ids[end + sampled.size :], 0)


@_compiled(*[_column(types.int64)] * 2, *[_padded(types.boolean)] * 2)
def pad_masks(
    prompt_length: _Ints, response_length: _Ints, attention: npt.NDArray[np.bool_], assistant: npt.NDArray[np.bool_]
) -> None:
    """True on ids, and on sampled ids, [B, F] each."""
    for index in range(prompt_length.size):
        start = prompt_length[index]
        end = start + response_length[index]
        _fill(attention[index, :end], True)
        _fill(attention[index, end:], False)
        _fill(assistant[index, :start], False)
        _fill(assistant[index, start:end], True)
        _fill(assistant[index, end:], False)


@_compiled(*[_column(types.int64)] * 4, _column(types.float32), *[_padded(types.float32)] * 2)
def pad_logprobs(
    rows: _Ints,
    prompt_length: _Ints,
    response_length: _Ints,
    starts: _Ints,
    logprobs: npt.NDArray[np.float32],
    response: npt.NDArray[np.float32],
    full: npt.NDArray[np.float32],
) -> None:
    """Log-probs of sampled ids into [B, R] and [B, F]; NaN where a row has none."""
    for index in range(rows.size):
        start, sampled = prompt_length[index], response_length[index]
        given = logprobs[starts[rows[index]] : starts[rows[index] + 1]]
        if given.size == sampled:
            _copy(response[index], given)
        else:
            _fill(response[index, :sampled], np.nan)
        _fill(response[index, sampled:], 0)
        _fill(full[index, :start], 0)
        _copy(full[index, start:], response[index, :sampled])
        _fill(full[index, start + sampled :], 0)


@_compiled(*[_column(types.int64)] * 3, _column(types.int32), _column(types.int64), _padded(types.int64))
def pad_versions(
    rows: _Ints, starts: _Ints, version: _Ints, count: npt.NDArray[np.int32], response_length: _Ints, out: _Ints
) -> None:
    """Run-lengths spelled out, one version a sampled id, into [B, R]; -1 elsewhere."""
    for index in range(rows.size):
        place, sampled = 0, out[index, : response_length[index]]
        _fill(out[index], -1)
        of_row = slice(starts[rows[index]], starts[rows[index] + 1])
        for number, length in zip(version[of_row], count[of_row]):  # noqa: B905 - numba's zip takes no `strict`
            _fill(sampled[place : place + length], number)
            place += length
