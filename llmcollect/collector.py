"""LLMCollector: what a training loop holds."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from llmcollect.backends.local import LocalBackend
from llmcollect.batch import StepBatch
from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.errors import SpecError
from llmcollect.preflight import check_components, open_root
from llmcollect.progress import ShardProgress
from llmcollect.run import Limits, RunSpec, Sampling, explain
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
        group_size: int = 1,
        num_shards: int | None = None,
        root: str | os.PathLike[str] | None = None,
        seed: int = 0,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(steps_per_batch, int) or steps_per_batch < 1:
            raise SpecError(f"steps_per_batch must be a positive number of rows; got {steps_per_batch!r}")
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
        self._backend: LocalBackend | None = None
        self._held: list[StepBatch] = []
        self._closed = False
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
        while sum(map(len, self._held)) < self._steps_per_batch and not self._closed:
            if self._backend is None:
                self._backend = LocalBackend(self.spec, self._root)
            table = self._backend.get()
            if table is None:
                self._closed = True
            else:
                self._held.append(StepBatch(table).without_failed())
        rows = StepBatch.concat(self._held)
        if not len(rows):
            raise StopIteration
        self._held = [rows[self._steps_per_batch :]]
        return rows[: self._steps_per_batch].to_tensordict()

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
        self._stream = Stream(iter(self._next_batch_or_none, None), replay_buffer, queue)

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

    def close(self) -> None:
        """Stop: what is in flight is given up, what has finished is committed, engines and envs are freed."""
        self._closed = True
        self._held = []
        if self._backend is not None:
            self._backend.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _env_spec(item: Any) -> EnvSpec:
    if isinstance(item, tuple):
        if len(item) != 2:
            raise SpecError(f"an env with a weight is a pair (constructor, weight); got {len(item)} items")
        return EnvSpec.of(item[0], weight=item[1])
    return EnvSpec.of(item)
