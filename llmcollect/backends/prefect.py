"""The prefect backend: a flow run of a deployment collects, and the store is where its rows are got from.

run_deployment -> [flow run] -> commits -> tail -> get
                      '-------- state --------'

The store is the buffer between them: a consumer that is slow lags behind, and nothing waits for it. The flow run is
asked for its state about once a second while there is nothing new; what it has left in the store is handed out before
its failure is raised.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from llmcollect.backends.base import BackendOptions, Delivery
from llmcollect.errors import RunFailedError, SpecError
from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec
from llmcollect.shard import Root
from llmcollect.store.files import LocalFiles
from llmcollect.store.record import CommitRecord
from llmcollect.store.tail import tail_run

_STATE_SECONDS = 1.0
_END_SECONDS = 60.0
_AWAY_SECONDS = 300.0


class PrefectOptions(BackendOptions):
    """`backend_options` for `backend="prefect"`.

    Attributes:
        deployment: Name of a deployment of the flow `collect`, `"<flow>/<deployment>"`.
        poll_seconds: How soon a shard that had no new commit is asked again, at first and at the most.
        max_poll_seconds: See `poll_seconds`.
        pickup_timeout_s: How long a worker may take to begin the flow run.
    """

    deployment: str = "collect/local"
    poll_seconds: float = Field(0.5, gt=0)
    max_poll_seconds: float = Field(5.0, gt=0)
    pickup_timeout_s: float = Field(180, gt=0)

    def check(self, spec: RunSpec, has_root: bool) -> None:
        if not has_root:
            raise SpecError("backend='prefect' needs a root, which the worker and this process both see")
        if spec.num_groups is None:
            raise SpecError("backend='prefect' needs num_groups: a flow plans its shards")
        for component in (*spec.envs, *spec.policies):
            component.require_stable("backend='prefect'")
        if not os.environ.get("PREFECT_API_URL") and not _configured_server():
            raise SpecError(
                "backend='prefect' needs a Prefect server: set PREFECT_API_URL "
                "(`make deployment` starts a server and says its address)"
            )

    @property
    def needs_stored(self) -> bool:
        return True

    def begin(self, spec: RunSpec, root: Root | None, rows: int, stored: Sequence[CommitRecord]) -> "PrefectBackend":
        assert root is not None
        return PrefectBackend(self, spec, root, stored)


class PrefectBackend:
    """One flow run, followed."""

    def __init__(self, options: PrefectOptions, spec: RunSpec, root: Root, stored: Sequence[CommitRecord]) -> None:
        self._options, self._spec, self._root = options, spec, root
        self._progress = [ShardProgress(shard) for shard in range(spec.num_shards)]
        self._stopped, self._finishing = threading.Event(), False
        self._begun = time.monotonic()
        self._run = self._submit()
        self._state: Any = None
        self._asked = self._answered = 0.0
        self._next = {record.shard: record.number + 1 for record in sorted(stored, key=lambda record: record.number)}
        self._commits = self._follow()

    @property
    def progress(self) -> list[ShardProgress]:
        return self._progress

    def get(self) -> Delivery | None:
        try:
            found = next(self._commits, None)
        except BaseException:
            self._commits = self._follow()  # an interrupted one has ended, and the run has not
            raise
        if found is not None:
            record, table = found
            self._next[record.shard] = record.number + 1
            progress = self._progress[record.shard]
            progress.done += len(record.trajectories)
            progress.failed += len(record.failed)
            progress.commits += 1
            return table, record.trajectories
        if self._failed and not (self._finishing or self._stopped.is_set()):
            raise RunFailedError(
                f"flow run {self._run.name!r} of deployment {self._options.deployment} is {self._state.name}: "
                f"{self._state.message or 'Prefect says no more'}"
            )
        return None

    def release(self, trajectories: int) -> None:
        """Nothing waits for room."""

    def finish(self) -> None:
        """A flow run has no way to be told that; it is cancelled, and commits what has finished."""
        self._finishing = True
        self._cancel()

    def stop(self) -> None:
        self._stopped.set()
        self._cancel()
        end = time.monotonic() + _END_SECONDS
        while not self._look(0).is_final() and time.monotonic() < end:
            time.sleep(0.2)

    def update_weights(self, folder: Path, version: int | None, policy: str) -> int:
        raise SpecError("backend='prefect' cannot take other weights while it runs")

    def _submit(self) -> Any:
        import httpx
        from prefect.exceptions import ObjectNotFound

        root = self._root.files.root
        if isinstance(self._root.files, LocalFiles):
            root = str(Path(root).absolute())  # the worker's folder is another one
        parameters = {"run": self._spec.model_dump(mode="json"), "root": root}
        with _client() as client:
            try:
                deployment = client.read_deployment_by_name(self._options.deployment)
            except (ObjectNotFound, ValueError) as error:
                raise SpecError(
                    f"there is no deployment {self._options.deployment!r} at {client.api_url}: "
                    f"`prefect deployment ls` shows those that there are"
                ) from error
            except httpx.TransportError as error:
                raise SpecError(f"no Prefect server answers at {client.api_url}: {error}") from error
            return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    def _follow(self) -> Iterator[tuple[CommitRecord, pa.Table]]:
        return tail_run(
            self._root.files,
            self._root.record.run,
            self._spec.num_shards,
            self._options.poll_seconds,
            max(self._options.poll_seconds, self._options.max_poll_seconds),
            _raise,
            first=dict(self._next),
            pause=self._pause,
            over=self._over,
        )

    def _pause(self, seconds: float) -> None:
        self._stopped.wait(min(seconds, _STATE_SECONDS))

    def _over(self) -> bool:
        """Whether nothing will be written any more."""
        if self._stopped.is_set():
            return True
        state = self._look(_STATE_SECONDS)
        waited = time.monotonic() - self._begun
        waiting = (state.is_scheduled() or state.is_pending()) and not self._progress_seen
        if waiting and waited > self._options.pickup_timeout_s:
            self._cancel()
            raise RunFailedError(
                f"no worker has picked up flow run {self._run.name!r} of deployment {self._options.deployment} "
                f"within {self._options.pickup_timeout_s:g} s: it is {state.name}; is one running "
                f"(`prefect worker start --pool {self._run.work_pool_name or '...'}`)?"
            )
        return bool(state.is_final())

    @property
    def _progress_seen(self) -> bool:
        return any(shard.commits for shard in self._progress)

    @property
    def _failed(self) -> bool:
        return self._look(_STATE_SECONDS).is_final() and not self._state.is_completed()

    def _look(self, max_age: float) -> Any:
        """The state of the flow run, not older than that; kept as it is once it is final."""
        if self._state is None or (not self._state.is_final() and time.monotonic() - self._asked >= max_age):
            import httpx

            try:
                with _client() as client:
                    self._state = client.read_flow_run(self._run.id).state
                self._answered = time.monotonic()
            except httpx.TransportError as error:  # the run goes on without its server, and so does the store
                if self._state is None or time.monotonic() - self._answered > _AWAY_SECONDS:
                    raise RunFailedError(f"the Prefect server does not answer: {error}") from error
            self._asked = time.monotonic()
        return self._state

    def _cancel(self) -> None:
        from prefect.states import Cancelling

        if not self._look(0).is_final():
            with contextlib.suppress(Exception), _client() as client:
                client.set_flow_run_state(self._run.id, Cancelling())


def _client() -> Any:
    """A client of the server that the environment names now: Prefect reads it once, when it is imported."""
    import llmcollect.prefect_defaults  # noqa: F401  isort: skip - sets what prefect reads at its import
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

    settings = (PREFECT_API_URL, PREFECT_API_KEY, PREFECT_API_AUTH_STRING)
    with temporary_settings(updates={one: os.environ[one.name] for one in settings if os.environ.get(one.name)}):
        return get_client(sync_client=True)


def _configured_server() -> bool:
    """Whether a profile of Prefect's names a server."""
    import llmcollect.prefect_defaults  # noqa: F401  isort: skip - sets what prefect reads at its import
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


def _raise(error: Exception, place: tuple[int, int]) -> None:
    raise error
