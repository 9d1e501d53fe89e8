"""FsspecFiles: an object store that fsspec reaches and that can put a file if it is absent, in one atomic request."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

from llmcollect.errors import StoreError
from llmcollect.settings import Settings

_T = TypeVar("_T")

_FIRST_PATIENCE_S = 10.0
_LONGEST_PAUSE_S = 15.0


class FsspecFiles:
    """Objects below a prefix. Made for stores that list what was just written, and write under a condition.

    A subclass says how the file system tells a failure that passes from one that stays; a file system whose
    `pipe_file(mode="create")` is one atomic request that raises FileExistsError needs nothing else. What passes is
    tried again, with growing pauses: for 10 seconds as long as the store has not answered once, and for 5 minutes
    (LLMCOLLECT_STORE_PATIENCE_S) after that. So a wrong address is told soon, and an outage in the middle of a run is
    waited out.

    Args:
        root: The URL, for messages.
        fs: A file system that caches no listings.
        prefix: Path of the root in it.
    """

    def __init__(self, root: str, fs: Any, prefix: str) -> None:
        self.root = root.rstrip("/")
        self._fs = fs
        self._prefix = prefix.strip("/")
        self._answered = False
        self._patience_s = Settings().store_patience_s

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self._call(f"write {self.root}/{path}", lambda: self._put(self._at(path), data))

    def read(self, path: str) -> bytes | None:
        return self.read_many([path])[0]

    def read_many(self, paths: Sequence[str], last: int | None = None) -> list[bytes | None]:
        found: dict[str, bytes | None] = {}

        def fetch() -> None:
            missing = [path for path in paths if path not in found]
            # A range even for all of it: without one s3fs asks for the size first, and lists what is not there.
            start = 0 if last is None else -last
            answers = self._fs.cat_ranges([self._at(path) for path in missing], start, None, on_error="return")
            failed = None
            for path, answer in zip(missing, answers, strict=True):
                if not isinstance(answer, BaseException):
                    found[path] = answer
                elif self._is_absent(answer):
                    found[path] = None
                elif self._is_empty(answer):
                    found[path] = b""
                else:
                    failed = answer
            if failed is not None:
                raise failed

        if paths:
            self._call(f"read {self.root}", fetch)
        return [found[path] for path in paths]

    def open(self, path: str) -> BinaryIO:
        # Arrow asks for just the ranges that it needs, and joins those that lie close together.
        file: BinaryIO = self._call(
            f"read {self.root}/{path}",
            lambda: self._fs.open(self._at(path), "rb", cache_type="none"),
            absent=FileNotFoundError,
        )
        return file

    def sizes(self, folder: str) -> dict[str, int]:
        found = self._call(f"list {self.root}/{folder}", lambda: self._fs.find(self._at(folder), detail=True))
        start = len(self._prefix) + 1
        # `find` gives the folder itself if it was empty at the first of its requests and is not at the next.
        files = ((name, info["size"]) for name, info in found.items() if info["type"] != "directory")
        return {name.lstrip("/")[start:]: int(size) for name, size in files}

    def arrow(self) -> tuple[Any, str]:
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        return PyFileSystem(FSSpecHandler(self._fs)), self._prefix

    def _put(self, path: str, data: bytes) -> bool:
        """One atomic request; False if the name is taken."""
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _is_absent(self, error: BaseException) -> bool:
        return isinstance(error, FileNotFoundError)

    def _is_empty(self, error: BaseException) -> bool:
        """Whether a range was refused because the file has no bytes at all."""
        return False

    def _passes(self, error: BaseException) -> bool:
        """Whether the same request may succeed in a while."""
        return isinstance(error, ConnectionError | TimeoutError)

    def _explain(self, error: BaseException) -> str:
        """The error in one line, without a secret."""
        return f"{type(error).__name__}: {error}".splitlines()[0]

    def _at(self, path: str) -> str:
        return f"{self._prefix}/{path}"

    def _call(self, doing: str, call: Callable[[], _T], absent: type[Exception] | None = None) -> _T:
        patience = self._patience_s if self._answered else min(_FIRST_PATIENCE_S, self._patience_s)
        deadline = time.monotonic() + patience
        pause = 0.1
        while True:
            try:
                result = call()
            except Exception as error:
                if absent is not None and self._is_absent(error):
                    raise absent(doing) from error
                if not self._passes(error) or time.monotonic() + pause > deadline:
                    raise StoreError(f"cannot {doing}: {self._explain(error)}") from error
                time.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._answered = True
                return result
