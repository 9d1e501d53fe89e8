"""The commit: one Parquet file of whole trajectories, with its CommitRecord in the footer."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmcollect.errors import CorruptFileError
from llmcollect.schema import STEP_SCHEMA
from llmcollect.store import layout
from llmcollect.store.files import Files
from llmcollect.store.record import CommitRecord
from llmcollect.store.selection import Selection

COMMIT_KEY = b"llmcollect.commit"
"""The key of the CommitRecord in a Parquet footer."""

WRITE_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    # Columns with few distinct values, or that repeat from row to row. Token ids gain as well: a vocabulary is small.
    "use_dictionary": ["run", "writer", "env", "policy", "finish_reason", "stop_reason", "prompt_ids.list.element"],
    # What filters ask for. Of texts and ids, a least and a greatest value say nothing.
    "write_statistics": [
        "shard",
        "trajectory",
        "group",
        "sample",
        "step",
        "env",
        "task_index",
        "policy",
        "policy_versions.list.element.version",
        "reward",
        "terminated",
        "truncated",
        "finish_reason",
        "finished_at",
    ],
    "row_group_size": 2048,
    "write_page_checksum": True,
    "write_page_index": True,
}
"""Arguments of `pyarrow.parquet.write_table`."""

_FOOTER = 64 << 10
_AT_ONCE = 256


def encode_commit(table: pa.Table, record: CommitRecord) -> bytes:
    """The file of a commit."""
    sink = pa.BufferOutputStream()
    footer = {COMMIT_KEY: record.model_dump_json().encode()}
    pq.write_table(table.replace_schema_metadata(footer), sink, **WRITE_OPTIONS)
    return bytes(sink.getvalue())


def read_footers(
    files: Files, places: Sequence[tuple[int, int]], run: str
) -> Iterator[CommitRecord | CorruptFileError | None]:
    """The records of commits of a run, given by shard and number, from footers alone.

    None where there is no such commit, and an error where it has no footer of that commit.
    """
    for start in range(0, len(places), _AT_ONCE):
        part = places[start : start + _AT_ONCE]
        tails = files.read_many([layout.commit_path(*place) for place in part], last=_FOOTER)
        for place, tail in zip(part, tails, strict=True):
            try:
                yield None if tail is None else _record_in(files, place, tail, run)
            except CorruptFileError as error:
                yield error


def read_commit_records(files: Files, places: Sequence[tuple[int, int]], run: str) -> Iterator[CommitRecord | None]:
    """`read_footers`, of which none is damaged.

    Raises:
        CorruptFileError: One is.
    """
    for footer in read_footers(files, places, run):
        if isinstance(footer, CorruptFileError):
            raise footer
        yield footer


def read_commit(files: Files, record: CommitRecord, selection: Selection | None = None) -> pa.Table:
    """The rows of a commit, checksums verified: whole trajectories, in the order in which they were written.

    Args:
        files: Where.
        record: Its record.
        selection: Which trajectories and columns; what it leaves out is not read, as far as row groups allow it.

    Raises:
        CorruptFileError: The file is damaged, gone, or not what the record says.
    """
    path = layout.commit_path(record.shard, record.number)
    try:
        if selection is None or not selection.reads_a_part:
            data = files.read(path)
            if data is None:
                raise FileNotFoundError("it is gone")
            return _selected(_open(pa.BufferReader(data)), record, selection)
        with files.open(path) as file:
            return _selected(_open(file), record, selection)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{files.root}/{path} cannot be read: {_first_line(error)}") from error


def decode_commit(files: Files, shard: int, number: int, data: bytes, run: str) -> tuple[CommitRecord, pa.Table]:
    """Record and rows of a commit that has been read whole.

    Raises:
        CorruptFileError: It is damaged.
    """
    record = _record_in(files, (shard, number), data, run)
    try:
        return record, _selected(_open(pa.BufferReader(data)), record, None)
    except (pa.ArrowException, OSError, ValueError) as error:
        path = layout.commit_path(shard, number)
        raise CorruptFileError(f"{files.root}/{path} cannot be read: {_first_line(error)}") from error


def _open(source: Any) -> pq.ParquetFile:
    return pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)


def _selected(file: pq.ParquetFile, record: CommitRecord, selection: Selection | None) -> pa.Table:
    schema = file.schema_arrow.remove_metadata()
    if not schema.equals(STEP_SCHEMA):
        raise ValueError("its columns are not those of a step")
    if file.metadata.num_rows != record.rows:
        raise ValueError(f"it has {file.metadata.num_rows} rows, and its record says {record.rows}")
    if selection is None or not selection.drops_some(record):
        # Readers read as many commits at once as there are cores: threads of Arrow's beside theirs gain nothing.
        table = file.read(None if selection is None else selection.stored_columns, use_threads=False)
        if pc.count_distinct(table["trajectory"]).as_py() != len(record.trajectories):
            raise ValueError("its rows are not those of the trajectories in its record")
    else:
        groups = [file.read_row_group(index, selection.key_columns) for index in range(file.num_row_groups)]
        kept = selection.trajectories(pa.concat_tables(groups))
        wanted = [index for index, keys in enumerate(groups) if pc.any(_is_in(keys, kept)).as_py()]
        table = file.read_row_groups(wanted, selection.stored_columns)
        table = table.filter(_is_in(table, kept))
    return _in_one_piece(table.replace_schema_metadata(None))


def _is_in(table: pa.Table, trajectories: pa.Array) -> pa.ChunkedArray:
    return pc.is_in(table["trajectory"], value_set=trajectories)


def _in_one_piece(table: pa.Table) -> pa.Table:
    """The same rows in one block of memory: a hundred blocks of a small commit leave a third more taken than used."""
    size = pa.MockOutputStream()
    with pa.ipc.new_stream(size, table.schema) as stream:
        stream.write_table(table)
    # Not out of Arrow's pool: between blocks that are held, a pool keeps what decoding left. And numpy asks for huge
    # pages: the first touch of small ones takes longer than the copy.
    block = pa.py_buffer(np.empty(size.size(), np.uint8))
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(block), table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(block).read_all()


def _record_in(files: Files, place: tuple[int, int], tail: bytes, run: str) -> CommitRecord:
    """The record in the last bytes of a file, which Parquet ends with its footer, its length and a mark."""
    path = layout.commit_path(*place)
    try:
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if len(tail) == _FOOTER < length:
            tail = files.read_many([path], last=length)[0] or b""
        metadata = pq.read_metadata(pa.BufferReader(tail)).metadata or {}
        if COMMIT_KEY not in metadata:
            raise ValueError("it is no commit of llmcollect; move it out of steps/")
        record = CommitRecord.model_validate_json(metadata[COMMIT_KEY])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{files.root}/{path} has no readable footer: {_first_line(error)}") from error
    if (record.shard, record.number) != place or record.run != run:
        raise CorruptFileError(
            f"{files.root}/{path} is another commit's file: number {record.number} of shard {record.shard} "
            f"of run {record.run}"
        )
    return record


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
