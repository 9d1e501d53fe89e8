"""LLMCollector: what a training loop holds.

backend (local, ray, prefect) -> get -> batching -> postproc -> next | async for | queue | replay buffer
"""

import _thread
import asyncio
import concurrent.futures
import math
import os
import queue as queues
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import pyarrow as pa
from pydantic import ValidationError

from llmcollect.backends import Backend, make_options
from llmcollect.batch import StepBatch
from llmcollect.batching import GroupBatching, Yields, make_batching
from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.errors import LLMCollectError, SpecError
from llmcollect.preflight import check_components, open_root
from llmcollect.progress import ShardProgress
from llmcollect.removed import refuse
from llmcollect.run import Limits, RunSpec, Sampling, explain
from llmcollect.store.reader import Run, stored_members_of_open_groups
from llmcollect.store.selection import Selection
from llmcollect.streaming import Queue, ReplayBuffer, Stream

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Constructor = Callable[..., Any] | ComponentSpec | str | dict[str, Any]
Resume = Literal["continue", "replay"]


class LLMCollector:
    """Collects steps of many conversations at once and hands them over in batches.

        for batch in collector: ...     # a TensorDict of `steps_per_batch` rows, one a step
        batch = next(collector)
        async for batch in collector: ...
        collector.start(replay_buffer=rb)    or    collector.start(queue=q)

    The collection begins with the first `next` and goes on in the background, as far ahead as `limits` allow. The
    iterator is the collector itself: a loop that was left goes on where it stopped, and two loops, in one thread or in
    several, share the stream: each batch goes to one of them. It ends when the run is complete; its last batch may be
    shorter. Rows of failed trajectories are left out.

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
        num_shards: Slices of the run; one an engine if not given.
        root: Folder or `s3://` URL that the rows are committed to before they are handed over. A root that holds a
            part of this run already is completed.
        resume: With such a root, "continue" yields new rows alone, and "replay" the stored ones before them.
        seed: What every seed of the run is derived from.
        backend: Where shards run: "local", in this process; "ray", in Ray actors; "prefect", in a flow run of a
            deployment.
        backend_options: What the backend can be told; see `llmcollect.backends.ray.RayOptions` and
            `llmcollect.backends.prefect.PrefectOptions`.
        sampling: Temperature and the like.
        limits: Concurrency, time-outs, retries, bounds.
        postproc: Called with each batch, as TorchRL's collectors do; what it returns is handed out.

    Raises:
        SpecError: An argument cannot be what was meant; one line says which.
        RunMismatchError: The root holds another run.
        StoreError: The root cannot be written.
        TypeError: There is no such argument; where it is one of other collectors, what does the same here.
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
        resume: Resume = "continue",
        seed: int = 0,
        backend: str = "local",
        backend_options: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        postproc: "Callable[[TensorDictBase], TensorDictBase] | None" = None,
        **unknown: Any,
    ) -> None:
        refuse(unknown)
        if not isinstance(steps_per_batch, int) or steps_per_batch < 1:
            raise SpecError(f"steps_per_batch must be a positive number of rows; got {steps_per_batch!r}")
        if not isinstance(total_steps, int) or (total_steps < 1 and total_steps != -1):
            raise SpecError(f"total_steps must be a positive number of rows, or -1 for no bound; got {total_steps!r}")
        for name, value, known in (("yields", yields, Yields), ("resume", resume, Resume)):
            if value not in get_args(known):
                raise SpecError(f"{name} must be one of {', '.join(map(repr, get_args(known)))}; got {value!r}")
        if postproc is not None and not callable(postproc):
            raise SpecError(f"postproc must be callable; got {postproc!r}")
        self._options = make_options(backend, backend_options)
        try:
            policies = tuple(ComponentSpec.of(item) for item in _as_list(policy))
            self.spec = RunSpec(
                envs=tuple(_env_spec(item) for item in _as_list(env)),
                policies=policies,
                num_groups=num_groups,
                group_size=group_size,
                num_shards=self._options.default_shards(len(policies)) if num_shards is None else num_shards,
                seed=seed,
                sampling=sampling or Sampling(),
                limits=limits or Limits(),
            )
        except ValidationError as error:
            raise SpecError(f"the run is not valid: {explain(error)}") from error
        self._options.check(self.spec, root is not None)
        self._steps_per_batch = steps_per_batch
        self._root = open_root(self.spec, root) if root is not None else None
        if self._root is None:
            check_components(self.spec)
        self._replay = resume == "replay"
        self._stored: Iterator[pa.Table] = iter(())
        self._total_steps = math.inf if total_steps == -1 else total_steps
        self._handed_out = 0
        keep_incomplete = self.spec.limits.on_incomplete_group == "keep"
        self._batching = make_batching(yields, steps_per_batch, group_size, keep_incomplete)
        self._postproc = postproc
        self._backend: Backend | None = None
        self._ended = False
        self._error: LLMCollectError | None = None
        self._lock = threading.RLock()  # of the collection's beginning and end
        self._reading = threading.Lock()  # of what is read from it: one at a time
        self._stream: Stream | None = None
        self._closed = False
        # Batches that can be taken, or what is raised instead; more than one only after an interrupt.
        self._made: deque[tuple[TensorDictBase | None, BaseException | None]] = deque()
        self._making = False
        self._arrived: queues.SimpleQueue[None] = queues.SimpleQueue()  # wakes who waits; may do so for nothing
        self._waiting, self._taking = threading.Lock(), threading.Lock()

    def __iter__(self) -> "Iterator[TensorDictBase]":
        return self

    def __next__(self) -> "TensorDictBase":
        """The next batch. A call that is interrupted (Ctrl-C) leaves its batch to the next call.

        Raises:
            StopIteration: The run is complete, or the collector is closed.
            LLMCollectError: What ended the collection; rows that came before it were yielded.
        """
        self._refuse_while_streaming()
        batch = self._next()
        if batch is None:
            raise StopIteration
        return batch

    def __aiter__(self) -> "AsyncIterator[TensorDictBase]":
        return self

    async def __anext__(self) -> "TensorDictBase":
        """The next batch; the loop of the caller runs on meanwhile. One that is cancelled leaves its batch to the next.

        Raises:
            StopAsyncIteration, LLMCollectError: As for `next`.
        """
        self._refuse_while_streaming()
        while not (self._made or self._closed):
            await asyncio.shield(asyncio.wrap_future(_in_thread(self._wait)))
        batch = self._next()
        if batch is None:
            raise StopAsyncIteration
        return batch

    def _next(self) -> "TensorDictBase | None":
        """The next batch; None at the end."""
        while not self._closed:
            self._wait()
            with self._taking:
                if not self._made:
                    continue  # another consumer has it
                batch, error = self._made[0]
                if batch is not None and self._postproc is not None:
                    batch = self._postproc(batch)
                self._made.popleft()  # the last act: who is interrupted before it finds the batch again
            if error is not None:
                raise error
            return batch
        return None

    def _wait(self) -> None:
        """Until there is a batch to take. It is made in a thread of its own, and so never in halves by a Ctrl-C."""
        with self._waiting:
            while not (self._made or self._closed):
                if not self._making:
                    # Not threading's own start(), which breaks its lock if it is interrupted.
                    _thread.start_new_thread(self._make, ())
                self._arrived.get()

    def _make(self) -> None:
        self._making = True
        try:
            made: tuple[TensorDictBase | None, BaseException | None] = self._next_batch(), None
        except BaseException as error:  # noqa: BLE001 - raised by who takes it
            made = None, error
        self._made.append(made)
        self._making = False
        self._arrived.put(None)

    def _refuse_while_streaming(self) -> None:
        if self._stream is None:
            return
        if self._stream.is_running():
            raise SpecError("this collector streams in the background since start(): read from its sink, or stop() it")
        if self._stream.error is not None:
            raise self._stream.error

    def _next_batch(self) -> "TensorDictBase | None":
        """The next batch before `postproc`; None at the end."""
        with self._reading:
            left = self._total_steps - self._handed_out
            rows = self._take() if left > 0 else None
            if rows is None:
                self._finish()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                return None
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
            if backend is None:
                return None
            try:
                if (stored := next(self._stored, None)) is not None:
                    self._batching.add_stored(stored)
                    continue
                arrived = backend.get()
            except LLMCollectError as error:
                self._error, self._ended = error, True  # raised once what came before it is handed out
                continue
            if arrived is None:
                self._ended = True
            else:
                backend.release(self._batching.add(*arrived))
        return rows

    def _running(self) -> Backend | None:
        """The collection, begun by whoever asks first; None if it was closed before."""
        with self._lock:
            if self._backend is None and not self._ended:
                self._backend = self._begin()
            return self._backend

    def _begin(self) -> Backend:
        groups = isinstance(self._batching, GroupBatching)
        commits = []
        if self._root is not None and (self._replay or groups or self._options.needs_stored):
            run = Run(self._root.files)
            commits = list(run.commits())
            if self._replay:
                everything = Selection({"include_failed": True})
                self._stored = (table for _, table in run.read(commits, everything))
            elif groups:
                self._stored = stored_members_of_open_groups(run, commits)
        return self._options.begin(self.spec, self._root, self._steps_per_batch, commits)

    def _finish(self) -> None:
        """At the bound: wait until what is in flight is committed; without a root nobody will see it."""
        if self._backend is not None and not self._ended:
            if self._root is None:
                self._backend.stop()
            else:
                while (arrived := self._backend.get()) is not None:
                    self._backend.release(len(arrived[1]))
        self._ended = True

    def start(
        self, *, replay_buffer: ReplayBuffer | None = None, queue: "Queue | asyncio.Queue[Any] | None" = None
    ) -> None:
        """Stream batches in the background, and return at once.

        A full queue blocks the collection and nothing is dropped; the last item on a queue is an `EndOfRun`, with the
        error if there was one.

        Args:
            replay_buffer: Its `extend` is called with each batch.
            queue: A `queue.Queue`, `multiprocessing.Queue`, `ray.util.queue.Queue`, or, from a coroutine, an
                `asyncio.Queue` of its loop; each batch is put on it.

        Raises:
            SpecError: Not exactly one of them is given, or it streams already.
        """
        if self.is_running():
            raise SpecError("this collector streams already: stop() it first")
        self._stream = Stream(iter(self._next, None), replay_buffer, queue, self.close)

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

    def stop(self, *, now: bool = False) -> None:
        """Let nothing new begin. What is in flight is finished and still comes to the sink, or to `next`; `join` waits.

        Args:
            now: Give up what is in flight, deliver nothing more, and close the collector.
        """
        if now:
            if self._stream is not None:
                self._stream.stop()
            self.close()
            return
        with self._lock:
            if self._backend is None:
                self._ended = True
            else:
                self._backend.finish()

    def progress(self) -> list[ShardProgress]:
        """Counters of each shard; empty before the first batch was asked for."""
        return self._backend.progress if self._backend else []

    def update_weights(
        self, folder: str | os.PathLike[str], version: int | None = None, *, policy: str | None = None
    ) -> int:
        """Give the engine other weights of the same model, while requests are in flight; they go on with them.

        `("tokens", "policy_version")` says for each token which weights it is from. It begins the collection if
        nothing else has.

        Args:
            folder: A Hugging Face checkpoint.
            version: Its number, greater than that of the weights before; None: the next one. The first weights are 0.
            policy: Name of the policy where there are several: see `collector.spec.policy_names`.

        Returns:
            The version.

        Raises:
            SpecError: The backend or the policy cannot, or the collector has ended.
            PolicyError: The weights cannot be loaded; those before serve on.
        """
        names = self.spec.policy_names
        if policy is None and len(names) > 1:
            raise SpecError(f"there are several policies, so update_weights needs one of them: {', '.join(names)}")
        if policy is not None and policy not in names:
            raise SpecError(f"there is no policy {policy!r}; there is {', '.join(names)}")
        backend = None if self._ended else self._running()
        if backend is None:
            raise SpecError("this collector has ended: there is no engine whose weights could be updated")
        return backend.update_weights(Path(folder).expanduser().absolute(), version, policy or names[0])

    @property
    def dropped_groups(self) -> int:
        """Incomplete groups that were left out so far, with `yields="groups"` and `on_incomplete_group="drop"`."""
        return self._batching.dropped if isinstance(self._batching, GroupBatching) else 0

    def close(self) -> None:
        """Stop: what is in flight is given up, what has finished is committed, engines and envs are freed."""
        self._ended = self._closed = True
        self._total_steps = self._handed_out  # what is held is not handed out any more
        with self._lock:
            if self._backend is not None:
                self._backend.stop()
        self._arrived.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _in_thread(function: Callable[[], None]) -> "concurrent.futures.Future[None]":
    """Run it in a daemon thread, which an interpreter that exits does not wait for."""
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def work() -> None:
        try:
            function()
            outcome.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=work, name="llmcollect await", daemon=True).start()
    return outcome


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _env_spec(item: Any) -> EnvSpec:
    if isinstance(item, tuple):
        if len(item) != 2:
            raise SpecError(f"an env with a weight is a pair (constructor, weight); got {len(item)} items")
        return EnvSpec.of(item[0], weight=item[1])
    return EnvSpec.of(item)
