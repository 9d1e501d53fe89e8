"""The seam to a file system: five calls, of which one must be atomic."""

import contextlib
import os
import uuid
from pathlib import Path
from typing import BinaryIO, Protocol

from llmcollect.errors import SpecError, StoreError


class Files(Protocol):
    """Files below one root, by relative path with `/`."""

    root: str

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Make the file appear whole under its name; False if the name is taken. Durable on return."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def open(self, path: str) -> BinaryIO:
        """The file, seekable.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        ...


class LocalFiles:
    """A folder. A file gets its name by `link(2)`, which fails if the name is taken, after its data is on disk."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._root = Path(root)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._root / path
        temporary = self._root / ".tmp" / uuid.uuid4().hex
        try:
            for folder in (target.parent, temporary.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            _sync_folder(target.parent)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return True

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def open(self, path: str) -> BinaryIO:
        return open(self._root / path, "rb")

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()


def open_files(root: str | os.PathLike[str]) -> Files:
    """The files below a root.

    Raises:
        SpecError: The root's kind of URL is not supported.
    """
    root = os.fspath(root)
    scheme, separator, rest = root.partition("://")
    if not separator:
        return LocalFiles(Path(root).expanduser())
    if scheme == "file":
        return LocalFiles(rest)
    raise SpecError(f"cannot use {root!r} as a root: roots are local folders, and {scheme}:// is not supported yet")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
