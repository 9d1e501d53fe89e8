"""StepTensorDict: the TensorDict that a training loop gets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch.nn.functional import pad

_PADDED: dict[tuple[str, str], int | float | bool] = {
    ("tokens", "prompt"): 0,
    ("tokens", "response"): 0,
    ("tokens", "full"): 0,
    ("tokens", "policy_version"): -1,
    ("log_probs", "response"): 0.0,
    ("log_probs", "full"): 0.0,
    ("masks", "all_attention_mask"): False,
    ("masks", "all_assistant_mask"): False,
}


class StepTensorDict(TensorDict):  # type: ignore[misc]  # tensordict is Any to mypy
    """A TensorDict whose padded keys may differ in width: `torch.cat` and `torch.stack` widen them first.

    Two batches of one collector are padded to the longest row of each, so their widths differ. Indexing, slicing,
    splitting, unbinding and moving give this class again. Everything else is a plain TensorDict's.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.cat, torch.stack) and args and all(isinstance(item, TensorDict) for item in args[0]):
            args = (_widened(args[0]), *args[1:])
        return super().__torch_function__(func, types, args, kwargs or {})


def _widened(batches: Sequence[TensorDict]) -> list[TensorDict]:
    """The batches with each padded key as wide as in the widest of them; one that fits already is not copied."""
    widths = {key: max((b[key].shape[-1] for b in batches if key in b), default=0) for key in _PADDED}
    return [_widen(batch, widths) for batch in batches]


def _widen(batch: TensorDict, widths: dict[tuple[str, str], int]) -> TensorDict:
    missing = {key: width - batch[key].shape[-1] for key, width in widths.items() if key in batch}
    if not any(missing.values()):
        return batch
    wide = batch.copy()
    for key, columns in missing.items():
        wide[key] = pad(batch[key], (0, columns), value=_PADDED[key])
    return wide
