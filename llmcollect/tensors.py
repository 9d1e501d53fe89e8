"""StepTensorDict: the TensorDict that a training loop gets, and TextStack: its texts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict.utils import LinkedList
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


class StepTensorDict(TensorDict):
    """A TensorDict whose padded keys may differ in width: `torch.cat` and `torch.stack` widen them first.

    Two batches of one collector are padded to the longest row of each, so their widths differ. Indexing, slicing,
    splitting, unbinding and moving give this class again. Everything else is a plain TensorDict's.
    """

    @classmethod
    def of_columns(cls, columns: Mapping[str, Mapping[str, Any]], size: int) -> Self:
        """Of tensors and texts with `size` rows, one TensorDict a group of columns; none of them is checked.

        The checks of a TensorDict take longer than all the copying for a batch of a few hundred rows. This way around
        them is the one that tensordict's own operations take.
        """
        batch_size = torch.Size([size])
        groups = {name: TensorDict._new_unsafe(dict(group), batch_size) for name, group in columns.items()}
        made: Self = cls._new_unsafe(groups, batch_size)
        return made

    def to_torchrl(self) -> LazyStackedTensorDict:
        """The rows as TorchRL's losses, transforms and `LazyStackStorage` take them: a lazy stack without padding.

        Each row has its own lengths: `("tokens", "prompt"|"response"|"full"|"policy_version")`, `("log_probs", ...)`
        and `("masks", ...)` are 1-d, and `("next", "reward")` is float32 [1, 1], which broadcasts over a row's tokens.
        All else is as it is here. It can be a collector's `postproc`: `postproc=StepTensorDict.to_torchrl`.

        `MCAdvantage(grpo_size=group_size, prompt_key=("collector", "group"))` finds the groups of batches of whole
        trajectories or groups, and `GRPOLoss` takes what it gives.
        """
        tokens = self["tokens"]
        prompts, responses = tokens["prompt_length"].tolist(), tokens["response_length"].tolist()
        rows = []
        for row, prompt, response in zip(self.unbind(0), prompts, responses, strict=True):
            lengths = {"prompt": prompt, "response": response, "policy_version": response}
            own = TensorDict(row.to_dict(retain_none=True, convert_tensors=False), [])
            for key in _PADDED:
                if key in row:
                    own[key] = row[key][: lengths.get(key[1], prompt + response)].clone()
            if ("next", "reward") in row:
                own["next", "reward"] = row["next", "reward"][None]
            rows.append(own)
        return LazyStackedTensorDict(*rows, stack_dim=0)

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


class TextStack(NonTensorStack):
    """A NonTensorStack of one text a row that makes its items when somebody asks for one of them.

    A NonTensorData takes tens of microseconds to make, and a batch has a dozen texts a row: more than all the rest of
    a step. Reading the texts, and taking rows by integers, slices or masks, makes none. Whatever else is done to the
    stack finds the items in their place.

    `TextStack.of(texts)` makes one.
    """

    _items: list[Any] | None
    _column: pa.ChunkedArray | list[str | None] | None

    @classmethod
    def of(cls, texts: pa.ChunkedArray | list[str | None]) -> Self:
        """Of one text a row, at least one: an Arrow column, of which strings are made when they are read, or a list."""
        stack = cls.__new__(cls)
        stack.__dict__.update(_state_of_a_stack(), _batch_size=torch.Size([len(texts)]), _items=None, _column=texts)
        return stack

    @property
    def _texts(self) -> list[str | None] | None:
        """The texts; None once they have been made items."""
        if self._column is not None and not isinstance(self._column, list):
            self._column = self._column.to_pylist()
        return self._column

    @property
    def tensordicts(self) -> list[Any]:
        """The items, made on first use."""
        if self._items is None:
            self._items = [NonTensorData(text) for text in self._texts or ()]
            self._column = None  # the items may be written to
        return self._items

    @tensordicts.setter
    def tensordicts(self, items: list[Any]) -> None:
        self._items, self._column = items, None

    def __getstate__(self) -> dict[str, Any]:
        # A slice of an Arrow column would take the whole column with it.
        texts = self._texts
        state: dict[str, Any] = super().__getstate__()
        return state | {"_column": texts}

    def _has_names(self) -> bool:
        # Asked whenever the stack is put into a TensorDict; texts that have not been made have no names.
        return self._column is None and super()._has_names()

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> list[Any]:
        if self._texts is None:
            items: list[Any] = super().tolist(as_linked_list=as_linked_list, **options)
            return items
        if not as_linked_list:
            return list(self._texts)
        return LinkedList(self._texts, td=self)  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> Any:
        if self._texts is None:
            return super().__getitem__(index)
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, int) and not isinstance(index, bool):
            return NonTensorData(self._texts[index])
        if isinstance(index, torch.Tensor) and index.ndim == 1:
            index = index.numpy(force=True)
        if isinstance(index, slice | range | list | np.ndarray):
            rows = np.arange(len(self._texts))[index]
            if rows.ndim == 1 and len(rows):
                return TextStack.of([self._texts[row] for row in rows])
        return super().__getitem__(index)


@functools.cache
def _state_of_a_stack() -> dict[str, Any]:
    """What every stack holds besides its items; a stack cannot be made without one, and making one takes long."""
    return dict(TextStack(NonTensorData("")).__dict__)


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
