"""Where DatasetEnv's items come from, by number: files, or one reader over an iterable.

    open_items(path)    JSONL, Parquet, a folder of them, or a Hugging Face dataset saved to disk
    LoaderItems(make)   any iterable of prompts, read once and in order

An item is a dict. Both are shared by all envs of a process and safe to use from their threads.
"""

import functools
import itertools
import json
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from llmcollect.errors import EnvError, SpecError

_WINDOW = 8192  # items that a loader's reader keeps: members of a group, retries and a second run ask again

Item = dict[str, Any]


class Items(Protocol):
    """Items by number."""

    def item(self, index: int) -> Item:
        """The item of a task.

        Raises:
            EnvError: It cannot be read.
        """
        ...


def open_items(path: str, split: str | None = None) -> Items:
    """Items of a file or folder; item `index % len`.

    Raises:
        SpecError: There is no such path, it holds nothing, or not what can be read here.
    """
    place = Path(path).expanduser().resolve()
    if not place.exists():
        raise SpecError(f"there is no dataset {path!r}: pass a JSONL or Parquet file, or a folder with them")
    return _open(place, split, place.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _open(place: Path, split: str | None, _changed: int) -> Items:
    files = [place] if place.is_file() else _files_of(place, split)
    parts: list[_Part] = []
    for file in files:
        if file.suffix == ".parquet":
            parts.append(_TablePart(pq.read_table(file, memory_map=True)))
        elif file.suffix == ".arrow":
            parts.append(_TablePart(_mapped(file)))
        elif file.suffix in (".jsonl", ".json", ".ndjson"):
            parts.append(_LinesPart(file))
        else:
            raise SpecError(f"cannot read {file}: datasets are .jsonl, .parquet or .arrow files")
    if not sum(map(len, parts)):
        raise SpecError(f"the dataset {place} holds no items")
    return _FileItems(parts)


def _files_of(folder: Path, split: str | None) -> list[Path]:
    """The data files of a folder, in order."""
    if (folder / "dataset_dict.json").exists():  # datasets.DatasetDict.save_to_disk
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        wanted = split or ("train" if "train" in splits else splits[0])
        if wanted not in splits:
            raise SpecError(f"the dataset {folder} has no split {wanted!r}; it has {', '.join(splits)}")
        folder, split = folder / wanted, None
    if (folder / "state.json").exists():  # datasets.Dataset.save_to_disk
        state = json.loads((folder / "state.json").read_text())
        return [folder / part["filename"] for part in state["_data_files"]]
    for suffix in ("parquet", "jsonl", "arrow"):
        found = sorted(file for file in folder.rglob(f"*.{suffix}") if split is None or split in file.name)
        if found:
            return found
    named = f" with {split!r} in their names" if split else ""
    raise SpecError(f"the folder {folder} holds no .parquet, .jsonl or .arrow files{named}")


def _mapped(file: Path) -> pa.Table:
    """An Arrow stream without a copy: the rows stay in the file until they are looked at."""
    with pa.memory_map(str(file)) as source:
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(source).read_all()


class _Part(Protocol):
    def __len__(self) -> int: ...

    def row(self, number: int) -> Any: ...


class _TablePart:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> Any:
        return self._table.slice(number, 1).to_pylist()[0]


class _LinesPart:
    """Lines of a file, found by their offsets: the file itself stays on disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle = os.open(file, os.O_RDONLY)
        self._spans: list[tuple[int, int, int]] = []
        start = 0
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    self._spans.append((start, len(line), number))
                start += len(line)

    def __len__(self) -> int:
        return len(self._spans)

    def row(self, number: int) -> Any:
        start, length, line = self._spans[number]
        try:
            return json.loads(os.pread(self._handle, length, start))
        except ValueError as error:
            raise EnvError(f"line {line} of {self._file} is no JSON: {error}") from error


class _FileItems:
    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def item(self, index: int) -> Item:
        number = index % self._starts[-1]
        part = bisect_right(self._starts, number) - 1
        return _as_item(self._parts[part].row(number - self._starts[part]))


@functools.lru_cache(maxsize=16)
def loader_items(make: Callable[[], Iterable[Any]]) -> "LoaderItems":
    """The one reader of this process for a constructor of a loader."""
    return LoaderItems(make)


class LoaderItems:
    """Numbers what an iterable yields, batched or not. At its end it is iterated again: the next epoch.

    Whoever asks for an item that lies ahead has those before it skipped, so a resumed run gets the items that it would
    have got, if the iterable has the same order each time (seed its shuffling). An item long past makes the reader
    begin anew.

    Args:
        make: Called for the iterable: a torch DataLoader, a list, a generator, ...
    """

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make
        self._reading = threading.Lock()
        self._begin()

    def item(self, index: int) -> Item:
        """The item that is yielded as number `index`, counting over epochs.

        Raises:
            EnvError: The iterable raised, is empty, or yields something else than prompts.
        """
        with self._reading:
            if index < self._next - len(self._window):
                self._begin()
            while index >= self._next:
                try:
                    item = _as_item(next(self._items))
                except Exception as error:
                    self._begin()  # a generator that has raised is at its end
                    if isinstance(error, EnvError):
                        raise
                    raise EnvError(f"the loader raised {type(error).__name__}: {error}") from error
                self._window.append(item)
                self._next += 1
            return self._window[index - self._next]

    def _begin(self) -> None:
        self._window: deque[Item] = deque(maxlen=_WINDOW)
        self._next = 0
        self._items = self._epochs()

    def _epochs(self) -> Iterator[Any]:
        iterable = self._make()
        while True:
            count = 0
            for element in iterable:
                for item in _unbatched(element):
                    count += 1
                    yield item
            if not count:
                raise EnvError(f"the loader of {getattr(self._make, '__qualname__', self._make)} yields nothing")
            if iter(iterable) is iterable:  # a generator is used up
                iterable = self._make()


def _as_item(value: Any) -> Item:
    """A row, a text or a conversation as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) or _is_conversation(value):
        return {"prompt": value}
    raise EnvError(f"an item must be a text, a list of messages or a dict; got {type(value).__name__}: {value!r:.100}")


def _unbatched(element: Any) -> Iterator[Any]:
    """The items of what a loader yielded: a text, a dict, a conversation, or a batch of any of them."""
    if isinstance(element, str) or _is_conversation(element):
        yield element
    elif isinstance(element, Mapping):
        columns = {key: _listed(value) for key, value in element.items()}
        if _is_batch(columns):
            names = list(columns)
            yield from (dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True))
        else:
            yield columns
    elif isinstance(element, list | tuple):
        for item in element:
            yield from _unbatched(item)
    else:
        raise EnvError(f"a loader must yield texts, messages or dicts; got {type(element).__name__}: {element!r:.100}")


def _listed(value: Any) -> Any:
    """Tensors and arrays, which collation makes, as lists or numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_batch(columns: Mapping[str, Any]) -> bool:
    """Whether every column is a list with one entry an item, and none of them is a single conversation."""
    values = list(columns.values())
    if not values or not all(isinstance(value, list | tuple) and not _is_conversation(value) for value in values):
        return False
    return len({len(value) for value in values}) == 1


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)
    )
