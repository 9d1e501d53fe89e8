"""DatasetEnv: prompts from a dataset, one answer each, and a reward by a function."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from llmcollect.components import import_target, stable_path
from llmcollect.envs.base import opening
from llmcollect.envs.items import Item, Items, loader_items, open_items
from llmcollect.errors import EnvError, SpecError
from llmcollect.types import Completion, Message, Observation, Task, Transition

Reward = Callable[[str, Item], float | Awaitable[float | None] | None]


class DatasetEnv:
    """Prompts of a dataset; single-turn.

    The task with index i gets item i, so each item is asked once an epoch, and repeats come from `group_size`. The item
    is stored with the task, so a reward can be recomputed later.

    Args:
        path: A JSONL or Parquet file, a folder of them, or a Hugging Face dataset saved to disk.
        reward: Import path of `reward(response, item) -> float` (or None for no reward), which gets the response's
            text and the item as a dict; `def`, in a thread of its own, or `async def`. Or the function itself.
        prompt: Column with the prompt, a text or a list of messages. None: "messages" if there is one, else "prompt".
            Assistant messages at its end are left out: they are the answer.
        split: Split of a dataset that has several; None: "train" if there is one.
        system: A system message to begin with.
        loader: Instead of `path`: see `from_dataloader`.

    Raises:
        SpecError: There is no such dataset or function.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        reward: str | Reward,
        prompt: str | None = None,
        split: str | None = None,
        system: str | None = None,
        loader: str | Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        if (path is None) == (loader is None):
            raise SpecError("DatasetEnv needs either a path or a loader")
        self._reward: Reward = _function(reward, "reward")
        self._prompt, self._system = prompt, system
        if path is not None:
            self._items: Items = open_items(path, split)
        else:
            assert loader is not None
            self._items = loader_items(_function(loader, "loader"))
        self._item: Item = {}

    @classmethod
    def from_dataloader(
        cls, make_loader: str | Callable[[], Iterable[Any]], *, reward: str | Reward, **options: Any
    ) -> "functools.partial[DatasetEnv]":
        """A constructor of envs over what an iterable yields: a torch DataLoader, a list, a generator.

        One reader a process numbers the items, over all epochs; a resumed run skips to where it is. For that the
        order must be the same each time: seed a loader that shuffles.

        Args:
            make_loader: Constructor of an iterable of texts, messages or dicts, batched or not, or its import path.
            reward: As above.
            options: `prompt` and `system`, as above.
        """
        return functools.partial(cls, loader=stable_path(make_loader), reward=stable_path(reward), **options)

    def reset(self, task: Task) -> Observation:
        """The prompt of item `task.index`."""
        self._item = self._items.item(task.index)
        return Observation(messages=opening(self._system, self._messages()), info={"item": self._item})

    def step(self, completion: Completion) -> Transition | Awaitable[Transition]:
        """The reward of the response."""
        reward = self._reward(completion.text, self._item)
        if inspect.isawaitable(reward):
            return _awaited(reward)
        return Transition(reward=reward, terminated=True)

    def _messages(self) -> Sequence[Message]:
        column = self._prompt or ("messages" if "messages" in self._item else "prompt")
        if column not in self._item:
            raise EnvError(f"an item has no column {column!r}; it has {', '.join(map(repr, self._item))}")
        prompt = self._item[column]
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):
            raise EnvError(f"column {column!r} must hold a text or a list of messages; got {prompt!r:.100}")
        # Arrow gives every message each key that any of them has.
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        return messages


async def _awaited(reward: Awaitable[float | None]) -> Transition:
    return Transition(reward=await reward, terminated=True)


def _function(source: str | Callable[..., Any], what: str) -> Callable[..., Any]:
    found = import_target(source) if isinstance(source, str) else source
    if not callable(found):
        raise SpecError(f"{what} must be a function or its import path; got {source!r}")
    return found
