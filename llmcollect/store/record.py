"""What is written about a run, a commit and an end, beside the rows: pydantic models, JSON on disk."""

import datetime
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmcollect.errors import CorruptFileError, RunMismatchError, StoreError
from llmcollect.run import RunSpec, explain
from llmcollect.schema import FORMAT_VERSION, STEP_SCHEMA
from llmcollect.store import layout
from llmcollect.store.files import Files


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)  # a later version may add fields


class RunRecord(_Record):
    """`run.json`: what a root holds. Written once, by whoever came first.

    Attributes:
        format: Version of layout and schema.
        run: Id of the run, in every row.
        spec: The spec as first asked for; `num_groups` may have grown since.
        fingerprints: One a policy: which model it is, whatever the arguments of its engine.
        logprobs: Of which distribution the log-probs are.
        columns: The columns of every commit; who resumes the run writes these.
    """

    format: int
    run: str
    created_at: datetime.datetime
    spec: dict[str, Any]
    fingerprints: tuple[str, ...]
    logprobs: str = "of the distribution that was sampled from (processed)"
    columns: tuple[str, ...] = tuple(STEP_SCHEMA.names)

    def parsed_spec(self) -> RunSpec:
        """The spec as a model; nothing that it names is imported."""
        return RunSpec.parse(self.spec)


class CommitRecord(_Record):
    """In the footer of each commit.

    Attributes:
        writer: Token of the writer: how it recognises its own commit when an answer was lost.
        trajectories: Numbers of the trajectories whose rows the commit holds, in order.
        failed: Those of them that ended in a failure.
        failed_attempts: Earlier tries at them that failed, of which no rows are kept.
        envs: Names of the envs of its trajectories.
        best_reward: The greatest sum of rewards of one of them; None: unknown.
        num_groups: Size of the run as the writer knew it.
        limits: The limits it ran with.
    """

    run: str
    shard: int
    number: int
    writer: str
    committed_at: datetime.datetime
    trajectories: tuple[int, ...]
    failed: tuple[int, ...] = ()
    failed_attempts: tuple[dict[str, Any], ...] = ()
    rows: int
    tokens: int
    policy_versions: tuple[int, ...] = ()
    envs: tuple[str, ...]
    best_reward: float | None = None
    num_groups: int | None = None
    limits: dict[str, Any] = Field(default_factory=dict)


class EndRecord(_Record):
    """A shard is complete: its counts, for the size of the run named here."""

    run: str
    shard: int
    commits: int
    trajectories: int
    failed: int
    rows: int
    tokens: int
    num_groups: int | None
    ended_at: datetime.datetime


def create_or_check_run(files: Files, spec: RunSpec, fingerprints: tuple[str, ...]) -> RunRecord:
    """Make the root the home of this run, or check that it is one already.

    Raises:
        RunMismatchError: The root holds another run; the message names the fields that differ.
        StoreError: The root cannot be written.
    """
    for component in (*spec.envs, *spec.policies):
        component.require_stable("a run with a root")
    record = RunRecord(
        format=FORMAT_VERSION,
        run=uuid.uuid4().hex[:16],
        created_at=now(),
        spec=spec.model_dump(mode="json"),
        fingerprints=fingerprints,
    )
    data = record.model_dump_json(indent=2).encode()
    if files.read(layout.RUN) is None and files.put_if_absent(layout.RUN, data):
        return record
    stored = read_run(files)
    _check_same_run(files.root, stored, record)
    return stored


def read_run(files: Files) -> RunRecord:
    """`run.json` of a root.

    Raises:
        StoreError: There is none, it cannot be read, or its format is newer than this version knows.
    """
    data = files.read(layout.RUN)
    if data is None:
        raise StoreError(f"{files.root} holds no run: it has no {layout.RUN}")
    try:
        record = RunRecord.model_validate_json(data)
    except ValidationError as error:
        raise CorruptFileError(f"{files.root}/{layout.RUN} is damaged: {explain(error)}") from error
    if record.format > FORMAT_VERSION:
        raise StoreError(
            f"{files.root} has format {record.format}, and this version of llmcollect reads up to {FORMAT_VERSION}: "
            f"update llmcollect"
        )
    return record


def now() -> datetime.datetime:
    """The time in UTC."""
    return datetime.datetime.now(datetime.UTC)


def _check_same_run(root: str, stored: RunRecord, wanted: RunRecord) -> None:
    """Identity must agree; engine arguments and limits may differ; `num_groups` may only grow."""
    differences = []
    for name in ("envs", "seed", "group_size", "num_shards", "sampling"):
        before, after = _identity(stored.spec.get(name)), _identity(wanted.spec[name])
        if before != after:
            differences.append(f"{name} (stored {before!r}, asked for {after!r})")
    if stored.fingerprints != wanted.fingerprints:
        differences.append(f"policies (stored {stored.fingerprints!r}, asked for {wanted.fingerprints!r})")
    before, after = stored.spec.get("num_groups"), wanted.spec["num_groups"]
    if before is not None and after is not None and after < before:
        differences.append(f"num_groups, which may only grow (stored {before}, asked for {after})")
    if differences:
        raise RunMismatchError(
            f"{root} holds another run; these fields differ: {'; '.join(differences)}. "
            f"Use the stored values to go on with it, or another root"
        )


def _identity(value: Any) -> Any:
    """A field of a spec without what only says where things run."""
    if isinstance(value, list):
        return [{k: v for k, v in item.items() if k != "isolate"} if isinstance(item, dict) else item for item in value]
    return value
