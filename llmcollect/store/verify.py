"""verify: recomputes what must hold of a run, and names each file in which something does not."""

import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from llmcollect.errors import CorruptFileError
from llmcollect.run import RunSpec
from llmcollect.store import catalog, layout
from llmcollect.store.commit import read_commit, read_footers
from llmcollect.store.files import Files, open_files
from llmcollect.store.record import CommitRecord, EndRecord, read_run


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that must hold and does not: in which file, and what."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(slots=True)
class Report:
    """What `verify` found.

    Attributes:
        run: Id of the run.
        planned: Trajectories of its plan; None if it is unbounded and has not ended.
        trajectories: Trajectories in the store.
        failed: Those of them that ended in a failure.
        commits, rows, tokens: Counts.
        ended: Whether every shard has an end for the run's size.
        leftover: Files of writers that were killed while they wrote, in `.tmp`: harmless.
        faults: What is wrong.
    """

    run: str
    planned: int | None = None
    trajectories: int = 0
    failed: int = 0
    commits: int = 0
    rows: int = 0
    tokens: int = 0
    ended: bool = False
    leftover: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what is there."""
        return not self.faults

    @property
    def complete(self) -> bool:
        """Whether nothing is wrong, and every planned trajectory is there."""
        return self.ok and self.ended and self.planned in (None, self.trajectories)


def verify(root: str | os.PathLike[str]) -> Report:
    """Read a whole run and check what must hold.

    Of the root: no foreign file, no missing commit number. Of each commit: checksums, schema, its record against its
    rows; ids, log-probs and versions of one length; the steps of a trajectory whole and in order. Of all: each
    trajectory once, in its own shard and in the plan; ends that agree with the commits.

    Returns:
        A report; nothing is changed.

    Raises:
        StoreError: There is no run, or it cannot be read.
    """
    files = open_files(root)
    run = read_run(files)
    spec = run.parsed_spec()
    report = Report(run.run)
    found = catalog.list_run(files, spec.num_shards, ends=True)
    report.leftover = len(files.sizes(".tmp"))
    report.faults += [Fault(path, "no file of a run of llmcollect") for path in found.foreign]
    report.faults += [Fault(path, "missing, and a later commit of its shard is there") for path in found.gaps]
    records = _check_commits(files, found, run.run, spec, report)
    _check_ends(files, found, records, spec, report)
    return report


def _check_commits(
    files: Files, found: catalog.Catalog, run: str, spec: RunSpec, report: Report
) -> dict[tuple[int, int], CommitRecord]:
    records: dict[tuple[int, int], CommitRecord] = {}
    home: dict[int, str] = {}
    places = found.places()
    for place, record in zip(places, read_footers(files, places, run), strict=True):
        path = layout.commit_path(*place)
        try:
            if not isinstance(record, CommitRecord):
                raise record or CorruptFileError("it is gone")
            table = read_commit(files, record)
        except CorruptFileError as error:
            report.faults.append(Fault(path, str(error)))
            continue
        records[place] = record
        report.faults += [Fault(path, what) for what in _faults_of(table, record, spec)]
        for trajectory in record.trajectories:
            if trajectory in home:
                report.faults.append(Fault(path, f"trajectory {trajectory} is in {home[trajectory]} already"))
            home[trajectory] = path
        report.commits += 1
        report.rows += record.rows
        report.tokens += record.tokens
        report.failed += len(record.failed)
    sizes = [record.num_groups for record in records.values() if record.num_groups is not None]
    groups = max([*sizes, spec.num_groups or 0])
    report.trajectories = len(home)
    report.planned = groups * spec.group_size or None
    if report.planned is not None:
        report.faults += [
            Fault(path, f"trajectory {number} is not in the plan of {report.planned}")
            for number, path in home.items()
            if not 0 <= number < report.planned
        ]
    return records


def _check_ends(
    files: Files,
    found: catalog.Catalog,
    records: dict[tuple[int, int], CommitRecord],
    spec: RunSpec,
    report: Report,
) -> None:
    ended = 0
    for shard, counts in sorted(found.ends.items()):
        for commits in sorted(counts):
            path = layout.end_path(shard, commits)
            try:
                end = EndRecord.model_validate_json(files.read(path) or b"")
            except ValidationError:
                report.faults.append(Fault(path, "cannot be read"))
                continue
            mine = [records.get((shard, number)) for number in range(commits)]
            if None in mine:
                report.faults.append(Fault(path, f"names {commits} commits, and not all of them are there and whole"))
                continue
            whole = [record for record in mine if record is not None]
            stored = {number for record in whole for number in record.trajectories}
            counted = (
                len(stored),
                sum(len(record.failed) for record in whole),
                sum(record.rows for record in whole),
                sum(record.tokens for record in whole),
            )
            if (end.trajectories, end.failed, end.rows, end.tokens) != counted:
                report.faults.append(Fault(path, "its counts are not those of its commits"))
            grown = spec.model_copy(update={"num_groups": end.num_groups})
            planned = (grown.groups_in_shard(shard) or 0) * spec.group_size if end.num_groups is not None else 0
            if grown.planned(stored) < planned:
                report.faults.append(Fault(path, f"says that the shard is complete; it lacks {planned - len(stored)}"))
            size = None if report.planned is None else report.planned // spec.group_size
            ended += commits == max(counts) and end.num_groups == size
    report.ended = ended == spec.num_shards


def _faults_of(table: pa.Table, record: CommitRecord, spec: RunSpec) -> list[str]:
    """What does not hold within a commit."""
    faults = []

    def must(holds: bool, what: str) -> None:
        if not holds:
            faults.append(what)

    numbers = {name: table[name].to_numpy() for name in ("trajectory", "group", "sample", "step", "shard")}
    trajectory, step = numbers["trajectory"], numbers["step"]
    first = np.concatenate([[True], trajectory[1:] != trajectory[:-1]])[: len(trajectory)]
    last = np.concatenate([trajectory[1:] != trajectory[:-1], [True]])[-len(trajectory) :]
    failed = table.filter(pc.is_valid(table["failure"]))["trajectory"]
    lengths = [pc.fill_null(pc.list_value_length(table[name]), 0).to_numpy() for name in ("response_ids",)]
    logprobs = pc.list_value_length(table["response_logprobs"])
    versions = pc.list_flatten(table["policy_versions"]).combine_chunks()

    must(table["run"].unique().to_pylist() == [record.run], "rows of another run")
    must(bool((numbers["shard"] == record.shard).all()), "rows of another shard")
    must(
        bool((numbers["group"] * spec.group_size + numbers["sample"] == trajectory).all()), "group and sample disagree"
    )
    must(bool((numbers["group"] % spec.num_shards == record.shard).all()), "trajectories of another shard")
    must(
        trajectory[first].tolist() == list(record.trajectories),
        "the record names other trajectories, or their rows are apart",
    )
    must(sorted(set(failed.to_pylist())) == sorted(record.failed), "the record names other failures")
    must(int(lengths[0].sum()) == record.tokens, "the record counts other tokens")
    must(
        sorted(versions.field("version").unique().to_pylist()) == sorted(record.policy_versions),
        "other policy versions",
    )
    must(sorted(table["env"].unique().to_pylist()) == sorted(record.envs), "the record names other envs")
    must(bool(np.isin(step[first], (-1, 0)).all()), "a trajectory that does not begin with its first step")
    must(bool((step[1:][~first[1:]] == step[:-1][~first[1:]] + 1).all()), "steps that are not in order")
    over = pc.or_(pc.or_(table["terminated"], table["truncated"]), pc.is_valid(table["failure"])).to_numpy()
    must(bool((over == last).all()), "a trajectory that has no end, or goes on after it")
    given = pc.is_valid(logprobs).to_numpy()
    must(
        bool((pc.fill_null(logprobs, 0).to_numpy()[given] == lengths[0][given]).all()),
        "log-probs and ids differ in number",
    )
    must(_version_counts(table["policy_versions"]) == lengths[0].tolist(), "policy versions and ids differ in number")
    must(all(count == 1 for count in Counter(trajectory[first].tolist()).values()), "a trajectory twice")
    return faults


def _version_counts(column: pa.ChunkedArray) -> list[int]:
    spans = column.combine_chunks()
    counts = np.zeros(len(spans), np.int64)
    np.add.at(counts, pc.list_parent_indices(spans).to_numpy(), pc.list_flatten(spans).field("count").to_numpy())
    return [int(count) for count in counts]
