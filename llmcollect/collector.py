"""LLMCollector: what a training loop holds."""

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, get_args

from pydantic import ValidationError

from llmcollect.backends.local import LocalBackend
from llmcollect.batch import StepBatch
from llmcollect.batching import GroupBatching, Yields, make_batching
from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.errors import LLMCollectError, SpecError
from llmcollect.preflight import check_components, open_root
from llmcollect.progress import ShardProgress
from llmcollect.run import Limits, RunSpec, Sampling, explain
from llmcollect.store.reader import stored_members_of_open_groups
from llmcollect.streaming import Queue, ReplayBuffer, Stream

if TYPE_CHECKING:
    from llmcollect.tensors import StepTensorDict

Constructor = Callable[..., Any] | ComponentSpec | str | dict[str, Any]


class LLMCollector:
    """Collects steps of many conversations at once and hands them over in batches.

        for batch in collector: ...     # a TensorDict of `steps_per_batch` rows, one a step
        batch = next(collector)
        collector.start(replay_buffer=rb)    or    collector.start(queue=q)

    The collection begins with the first `next` and goes on in the background, as far ahead as `limits` allow. The
    iterator is the collector itself: a loop that was left goes on where it stopped. It ends when the run is complete;
    its last batch may be shorter. Rows of failed trajectories are left out.

    Args:
        env: A constructor of an env (class, function, `functools.partial`, import path), or a list of them; an item
            of the list may be a pair of constructor and weight.
        policy: A constructor of a policy, or a list of them: one engine each, shards spread over them.
        steps_per_batch: Rows of a batch.
        num_groups: Size of the run in groups; None: without end.
        total_steps: Rows after which the collector ends; -1: none. At the bound nothing new begins, and with a root
            what is in flight is finished and committed. With `yields="steps"` and "last_steps" exactly so many rows
            are handed out, with "trajectories" and "groups" the batch that reaches the bound is still whole.
        yields: What a batch consists of: "steps", exactly `steps_per_batch` rows; "last_steps", of which each has a
            whole conversation as its context; "trajectories" or "groups", whole ones with at least `steps_per_batch`
            rows together. A batch of groups also has `("group", "expected"|"arrived"|"failed")`, int64 [B]: the
            members of the row's group.
        group_size: Trajectories of each task, with different sampling seeds.
        num_shards: Slices of the run; one a policy if not given.
        root: Folder that the rows are committed to before they are handed over. A root that holds a part of this run
            already is completed: only new rows are yielded.
        seed: What every seed of the run is derived from.
        sampling: Temperature and the like.
        limits: Concurrency, time-outs, retries, bounds.

    Raises:
        SpecError: An argument cannot be what was meant; one line says which.
        RunMismatchError: The root holds another run.
        StoreError: The root cannot be written.
    """

    def __init__(
        self,
        env: Constructor | Sequence[Constructor | tuple[Constructor, float]],
        policy: Constructor | Sequence[Constructor],
        *,
        steps_per_batch: int,
        num_groups: int | None = None,
        total_steps: int = -1,
        yields: Yields = "steps",
        group_size: int = 1,
        num_shards: int | None = None,
        root: str | os.PathLike[str] | None = None,
        seed: int = 0,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(steps_per_batch, int) or steps_per_batch < 1:
            raise SpecError(f"steps_per_batch must be a positive number of rows; got {steps_per_batch!r}")
        if not isinstance(total_steps, int) or (total_steps < 1 and total_steps != -1):
            raise SpecError(f"total_steps must be a positive number of rows, or -1 for no bound; got {total_steps!r}")
        if yields not in get_args(Yields):
            raise SpecError(f"yields must be one of {', '.join(map(repr, get_args(Yields)))}; got {yields!r}")
        try:
            policies = tuple(ComponentSpec.of(item) for item in _as_list(policy))
            self.spec = RunSpec(
                envs=tuple(_env_spec(item) for item in _as_list(env)),
                policies=policies,
                num_groups=num_groups,
                group_size=group_size,
                num_shards=max(1, len(policies)) if num_shards is None else num_shards,
                seed=seed,
                sampling=sampling or Sampling(),
                limits=limits or Limits(),
            )
        except ValidationError as error:
            raise SpecError(f"the run is not valid: {explain(error)}") from error
        self._steps_per_batch = steps_per_batch
        self._root = open_root(self.spec, root) if root is not None else None
        if self._root is None:
            check_components(self.spec)
        self._total_steps = math.inf if total_steps == -1 else total_steps
        self._handed_out = 0
        keep_incomplete = self.spec.limits.on_incomplete_group == "keep"
        self._batching = make_batching(yields, steps_per_batch, group_size, keep_incomplete)
        self._backend: LocalBackend | None = None
        self._ended = False
        self._error: LLMCollectError | None = None
        self._lock = threading.RLock()
        self._stream: Stream | None = None

    def __iter__(self) -> Iterator["StepTensorDict"]:
        return self

    def __next__(self) -> "StepTensorDict":
        """The next batch.

        Raises:
            StopIteration: The run is complete, or the collector is closed.
            LLMCollectError: What ended the collection; rows that came before it were yielded.
        """
        if self._stream is not None and self._stream.is_running():
            raise SpecError("this collector streams in the background since start(): read from its sink, or stop() it")
        return self._next_batch()

    def _next_batch(self) -> "StepTensorDict":
        left = self._total_steps - self._handed_out
        rows = self._take() if left > 0 else None
        if rows is None:
            self._finish()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration
        if self._batching.divisible and len(rows) > left:
            rows = rows[: int(left)]
        self._handed_out += len(rows)
        if self._handed_out >= self._total_steps and self._backend is not None:
            self._backend.finish()
        return self._batching.to_tensordict(rows)

    def _take(self) -> StepBatch | None:
        """The next batch; None at the end."""
        while (rows := self._batching.take(at_end=self._ended)) is None and not self._ended:
            backend = self._running()
            try:
                arrived = backend.get()
            except LLMCollectError as error:
                self._error, self._ended = error, True  # raised once what came before it is handed out
                continue
            if arrived is None:
                self._ended = True
            else:
                backend.release(self._batching.add(*arrived))
        return rows

    def _running(self) -> LocalBackend:
        """The collection, begun by whoever asks first; `close` may come at the same time from another thread."""
        with self._lock:
            if self._backend is None:
                if self._ended:
                    raise StopIteration
                self._backend = self._begin()
            return self._backend

    def _begin(self) -> LocalBackend:
        if self._root is None:
            return LocalBackend(_cut_for_memory(self.spec, self._steps_per_batch), None)
        if isinstance(self._batching, GroupBatching):
            for table in stored_members_of_open_groups(self._root.files):
                self._batching.add_stored(table)
        return LocalBackend(self.spec, self._root)

    def _finish(self) -> None:
        """At the bound: wait until what is in flight is committed; without a root nobody will see it."""
        if self._backend is not None and not self._ended:
            if self._root is None:
                self._backend.stop()
            else:
                while (arrived := self._backend.get()) is not None:
                    self._backend.release(len(arrived[1]))
        self._ended = True

    def start(self, *, replay_buffer: ReplayBuffer | None = None, queue: Queue | None = None) -> None:
        """Stream batches in the background, and return at once.

        A full queue blocks the collection and nothing is dropped; the last item on a queue is an `EndOfRun`, with the
        error if there was one.

        Args:
            replay_buffer: Its `extend` is called with each batch.
            queue: A `queue.Queue` or `multiprocessing.Queue`; each batch is put on it.

        Raises:
            SpecError: Not exactly one of them is given, or it streams already.
        """
        if self.is_running():
            raise SpecError("this collector streams already: stop() it first")
        self._stream = Stream(iter(self._next_batch_or_none, None), replay_buffer, queue, self.close)

    def is_running(self) -> bool:
        """Whether a stream that `start` began goes on."""
        return self._stream is not None and self._stream.is_running()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the stream that `start` began has ended.

        Raises:
            TimeoutError: It has not ended in `timeout` seconds.
            LLMCollectError: What ended the collection, or whatever the sink raised.
        """
        if self._stream is not None:
            self._stream.join(timeout)

    def stop(self) -> None:
        """End the stream that `start` began, and close the collector."""
        if self._stream is not None:
            self._stream.stop()
        self.close()

    def _next_batch_or_none(self) -> "StepTensorDict | None":
        try:
            return self._next_batch()
        except StopIteration:
            return None

    def progress(self) -> list[ShardProgress]:
        """Counters of each shard; empty before the first batch was asked for."""
        return self._backend.progress if self._backend else []

    @property
    def dropped_groups(self) -> int:
        """Incomplete groups that were left out so far, with `yields="groups"` and `on_incomplete_group="drop"`."""
        return self._batching.dropped if isinstance(self._batching, GroupBatching) else 0

    def close(self) -> None:
        """Stop: what is in flight is given up, what has finished is committed, engines and envs are freed."""
        self._ended = True
        self._total_steps = self._handed_out  # what is held is not handed out any more
        with self._lock:
            if self._backend is not None:
                self._backend.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _cut_for_memory(spec: RunSpec, rows: int) -> RunSpec:
    """Without files there is no reason to gather many rows before they are handed over."""
    limits = spec.limits
    sooner = {"commit_rows": min(limits.commit_rows, rows), "commit_seconds": min(limits.commit_seconds, 0.1)}
    return spec.model_copy(update={"limits": limits.model_copy(update=sooner)})


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _env_spec(item: Any) -> EnvSpec:
    if isinstance(item, tuple):
        if len(item) != 2:
            raise SpecError(f"an env with a weight is a pair (constructor, weight); got {len(item)} items")
        return EnvSpec.of(item[0], weight=item[1])
    return EnvSpec.of(item)
