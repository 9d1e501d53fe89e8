"""The seam to a file system: six calls, of which one must be atomic."""

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from llmcollect.errors import SpecError, StoreError


class Files(Protocol):
    """Files below one root, by relative path with `/`. Calls block, and may come from several threads.

    Whatever goes wrong is a StoreError of one line. A file that is not there is None where the result allows it.

    Attributes:
        root: The root as messages show it.
    """

    root: str

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Make the file appear whole under its name; False if the name is taken. Durable on return.

        False is also what a writer may get for its own file, if the answer to its first request was lost.
        """
        ...

    def read(self, path: str) -> bytes | None:
        """The whole file."""
        ...

    def read_many(self, paths: Sequence[str], last: int | None = None) -> list[bytes | None]:
        """Several files, at the same time where that is faster; of each the last so many bytes, or all."""
        ...

    def open(self, path: str) -> BinaryIO:
        """The file, seekable, for reading parts of it.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Path and size in bytes of every file below a folder, at any depth; asked for anew, never from a cache."""
        ...

    def arrow(self) -> tuple[Any, str]:
        """A `pyarrow.fs.FileSystem`, and the path of the root in it."""
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

    def read(self, path: str) -> bytes | None:
        return self._read(path, None)

    def read_many(self, paths: Sequence[str], last: int | None = None) -> list[bytes | None]:
        return [self._read(path, last) for path in paths]

    def open(self, path: str) -> BinaryIO:
        try:
            return open(self._root / path, "rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {self._root / path}: {error.strerror or error}") from error

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            return dict(self._files_below(self._root / folder))
        except OSError as error:
            raise StoreError(f"cannot read {self._root / folder}: {error.strerror or error}") from error

    def arrow(self) -> tuple[Any, str]:
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem(), str(self._root.absolute())

    def _read(self, path: str, last: int | None) -> bytes | None:
        try:
            with self.open(path) as file:
                if last is not None:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - last))
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self._root / path}: {error.strerror or error}") from error

    def _files_below(self, folder: Path) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        if folder.is_dir():
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        found += self._files_below(Path(entry.path))
                    else:
                        found.append((Path(entry.path).relative_to(self._root).as_posix(), entry.stat().st_size))
        return found


def open_files(root: str | os.PathLike[str]) -> Files:
    """The files below a root: a local folder, or `s3://bucket/path`. Nothing is read or made by this call.

    Raises:
        SpecError: The root's kind of URL is not supported, or what it needs is not installed.
    """
    root = os.fspath(root)
    scheme, separator, rest = root.partition("://")
    if not separator:
        return LocalFiles(Path(root).expanduser())
    if scheme == "file":
        return LocalFiles(rest)
    if "@" in rest.partition("/")[0]:
        raise SpecError(f"a {scheme}:// root must not hold credentials: they come from the environment or a profile")
    if scheme == "s3":
        from llmcollect.store.s3 import S3Files

        return S3Files(root)
    raise SpecError(f"cannot use {root!r} as a root: roots are local folders and s3:// URLs")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
