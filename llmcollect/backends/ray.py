"""The ray backend: one actor a policy replica, each with shards of its own; their rows stream back as Arrow.

ShardActor (LocalBackend over some shards) -> object store -> get -> consumer

Each actor has one delivery on its way, and stops new trajectories where nobody takes it: that bounds what is held. An
actor that dies is replaced and goes on with its shards. What it had committed and not delivered is read from the root;
without a root, the trajectories that were not delivered start again. So each trajectory is delivered once.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from llmcollect.backends.base import BackendOptions, Delivery
from llmcollect.backends.local import LocalBackend, cut_for_memory
from llmcollect.errors import LLMCollectError, RunFailedError, SpecError
from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec
from llmcollect.shard import Root
from llmcollect.store.files import LocalFiles, open_files
from llmcollect.store.reader import Run
from llmcollect.store.record import CommitRecord, read_run
from llmcollect.store.selection import Selection

_STOP_SECONDS = 60.0
_LOOK_SECONDS = 1.0


class RayOptions(BackendOptions):
    """`backend_options` for `backend="ray"`.

    Attributes:
        num_replicas: Actors for each policy, each with an engine of its own; shards are dealt to them.
        num_gpus, num_cpus: What an actor reserves.
        resources, runtime_env: Handed to the actor as they are.
        max_restarts: How many actors that died are replaced.
    """

    num_replicas: int = Field(1, ge=1)
    num_gpus: float = Field(0, ge=0)
    num_cpus: float = Field(1, ge=0)
    resources: dict[str, float] | None = None
    runtime_env: dict[str, Any] | None = None
    max_restarts: int = Field(3, ge=0)

    def default_shards(self, policies: int) -> int:
        return max(1, policies) * self.num_replicas

    def check(self, spec: RunSpec, has_root: bool) -> None:
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise SpecError("backend='ray' needs Ray: pip install 'llmcollect[ray]'") from error
        if spec.num_shards < len(spec.policies) * self.num_replicas:
            raise SpecError(
                f"num_shards must be at least the number of actors, {len(spec.policies) * self.num_replicas}: "
                f"each has shards of its own; got {spec.num_shards}"
            )

    @property
    def needs_stored(self) -> bool:
        return True

    def begin(self, spec: RunSpec, root: Root | None, rows: int, stored: Sequence[CommitRecord]) -> "RayBackend":
        return RayBackend(self, spec if root else cut_for_memory(spec, rows), root, stored)


class ShardActor:
    """Some shards of a collection, in a process of its own. A Ray actor; a thread for each call.

    Args:
        spec: The run.
        root: Where its home is, or None.
        shards: Which of its shards.
        skip: Trajectories, by shard, that the consumer has already, where there is no root.
    """

    def __init__(
        self, spec: RunSpec, root: str | None, shards: Sequence[int], skip: Mapping[int, Collection[int]]
    ) -> None:
        opened = None
        if root is not None:
            files = open_files(root)
            opened = Root(files, read_run(files))
        self._backend = LocalBackend(spec, opened, shards, skip)

    def get(self) -> tuple[Delivery | None, list[ShardProgress]]:
        """The next rows, or None at the end; and the counters. Their room is free again: they are on their way."""
        found = self._backend.get()
        if found is not None:
            self._backend.release(len(found[1]))
        return found, self._backend.progress

    def finish(self) -> None:
        """See `Backend.finish`."""
        self._backend.finish()

    def stop(self) -> None:
        """See `Backend.stop`."""
        self._backend.stop()


class _Replica:
    """An actor, as the consumer's process sees it."""

    def __init__(self, shards: list[int]) -> None:
        self.shards = shards
        self.actor: Any = None
        self.coming: Any = None  # the reference to the delivery that is on its way; None once it has ended


class RayBackend:
    """One collection on Ray actors."""

    def __init__(self, options: RayOptions, spec: RunSpec, root: Root | None, stored: Sequence[CommitRecord]) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        self._ray, self._options, self._spec, self._root = ray, options, spec, root
        self._progress = {shard: ShardProgress(shard) for shard in range(spec.num_shards)}
        # What need not be delivered: it was, or it is the consumer's from before.
        self._seen: dict[int, set[int]] = {shard: set() for shard in range(spec.num_shards)}
        for record in stored:
            self._seen[record.shard].update(record.trajectories)
        self._found: deque[Delivery] = deque()
        self._restarts = 0
        self._stopped = self._finishing = False
        policies = len(spec.policies)
        self._replicas = []
        for policy in range(policies):
            own = [shard for shard in range(spec.num_shards) if spec.policy_of_shard(shard) == policy]
            self._replicas += [_Replica(own[index :: options.num_replicas]) for index in range(options.num_replicas)]
        for replica in self._replicas:
            self._start(replica)
        self._changed, self._freeing = threading.Condition(), threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        # A thread of its own takes what comes: an interrupted consumer loses nothing.
        threading.Thread(target=self._receive_all, name="llmcollect ray", daemon=True).start()

    @property
    def progress(self) -> list[ShardProgress]:
        return list(self._progress.values())

    def get(self) -> Delivery | None:
        with self._changed:
            self._changed.wait_for(lambda: self._found or self._ended)
            if self._found:
                found = self._found.popleft()
                self._changed.notify_all()
                return found
            if self._error is not None and not self._stopped:
                raise self._error
            return None

    def release(self, trajectories: int) -> None:
        """The room of a delivery is free once it is on its way: one an actor is."""

    def finish(self) -> None:
        self._finishing = True
        with self._freeing:
            for replica in self._replicas:
                if replica.actor is not None:
                    replica.actor.finish.remote()

    def stop(self) -> None:
        self._stopped = True
        with self._changed:
            self._changed.notify_all()
        self._free()

    def update_weights(self, folder: Path, version: int | None, policy: str) -> int:
        raise SpecError("backend='ray' cannot take other weights while it runs")

    def _free(self) -> None:
        """End the actors, once they have committed what had finished; where they are, there are GPUs."""
        with self._freeing:
            actors = [replica.actor for replica in self._replicas if replica.actor is not None]
            ends = [actor.stop.remote() for actor in actors]
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS)
            for replica in self._replicas:
                if replica.actor is not None:
                    self._ray.kill(replica.actor)
                    replica.actor = None

    def _start(self, replica: _Replica) -> None:
        options = self._options
        actor = self._ray.remote(ShardActor).options(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=options.resources,
            runtime_env=options.runtime_env,
            max_concurrency=4,  # a call that waits for rows must not keep the others waiting
        )
        skip = {} if self._root else {shard: self._seen[shard] for shard in replica.shards}
        replica.actor = actor.remote(self._spec, _absolute(self._root), replica.shards, skip)
        replica.coming = replica.actor.get.remote()
        if self._finishing:
            replica.actor.finish.remote()

    def _receive_all(self) -> None:
        """Until each actor has ended, or one cannot be replaced; waits while the consumer has enough."""
        try:
            while not self._stopped:
                waiting = {replica.coming: replica for replica in self._replicas if replica.coming is not None}
                if not waiting:
                    return
                ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_LOOK_SECONDS)
                for reference in ready:
                    self._receive(waiting[reference])
                with self._changed:
                    self._changed.wait_for(lambda: len(self._found) < len(self._replicas) or self._stopped)
        except BaseException as error:  # noqa: BLE001 - raised by get()
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            with contextlib.suppress(Exception):  # the cluster may be gone, and its actors with it
                self._free()

    def _receive(self, replica: _Replica) -> None:
        """Take the delivery that has come, and ask for the next one."""
        try:
            found, progress = self._ray.get(replica.coming)
        except self._ray.exceptions.RayActorError as error:
            self._replace(replica, error)
            return
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LLMCollectError):
                raise cause from None
            raise RunFailedError(f"a Ray actor failed: {type(cause).__name__}: {cause}") from error
        for counters in progress:
            self._progress[counters.shard] = counters
        if found is None:
            replica.coming = None
            return
        self._deliver(*found)
        replica.coming = replica.actor.get.remote()

    def _deliver(self, table: pa.Table, trajectories: Sequence[int]) -> None:
        for number in trajectories:
            self._seen[number // self._spec.group_size % self._spec.num_shards].add(number)
        with self._changed:
            self._found.append((table, trajectories))
            self._changed.notify_all()

    def _replace(self, replica: _Replica, error: Exception) -> None:
        """Another actor for the shards of one that died."""
        if self._stopped:
            replica.coming = None
            return
        if self._restarts >= self._options.max_restarts:
            raise RunFailedError(
                f"a Ray actor died, after {self._restarts} were replaced, as many as max_restarts allows: "
                f"{' '.join(str(error).split())[:500]}"
            ) from error
        self._restarts += 1
        if self._root is not None:
            self._deliver_stored(self._root, replica.shards)
        self._start(replica)

    def _deliver_stored(self, root: Root, shards: Collection[int]) -> None:
        """What a dead actor had committed and not delivered."""
        run = Run(root.files)
        missing = [
            record
            for record in run.commits()
            if record.shard in shards and not self._seen[record.shard].issuperset(record.trajectories)
        ]
        for record, table in run.read(missing, Selection({"include_failed": True})):
            new = [number for number in record.trajectories if number not in self._seen[record.shard]]
            rows = table.filter(pc.is_in(table["trajectory"], value_set=pa.array(new, pa.int64())))
            self._deliver(rows, new)


def _absolute(root: Root | None) -> str | None:
    """The root as an actor finds it, whose folder is another one."""
    if root is None:
        return None
    return str(Path(root.files.root).absolute()) if isinstance(root.files, LocalFiles) else root.files.root
