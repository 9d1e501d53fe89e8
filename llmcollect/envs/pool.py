"""EnvPool: makes the instances of one env, lends them to trajectories, and keeps their blocking calls off the loop.

borrow -> EnvHandle -> reset, step, ... -> give_back   (reused)
                                        -> discard     (after a failure: never reused)
"""

import asyncio
import contextlib
import inspect
import math
import numbers
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from llmcollect.components import EnvSpec
from llmcollect.envs.base import require_methods
from llmcollect.envs.process import ProcessEnv
from llmcollect.errors import EnvError, LLMCollectError
from llmcollect.types import Completion, Observation, Task, Transition


def make_env(spec: EnvSpec, name: str) -> Any:
    """One instance, in a process of its own if the spec says so. Blocks.

    Raises:
        SpecError: The target cannot be imported or does not take its kwargs.
        EnvError: The constructor raised, or made something without reset() and step().
    """
    constructor = spec.constructor()
    in_process = spec.isolate == "process"
    try:
        env = ProcessEnv(constructor, spec.kwargs, name) if in_process else constructor(**spec.kwargs)
    except LLMCollectError:
        raise
    except Exception as error:
        raise EnvError(f"env {name} could not be made: {type(error).__name__}: {error}") from error
    require_methods(env, name)
    return env


class EnvPool:
    """Instances of one env. Belongs to one event loop.

    Attributes:
        hung: Instances that were given up while a call of theirs was still running, and that hold a thread for it; a
            process is ended instead.
        late: Results of calls that had been given up; they are dropped.
    """

    def __init__(self, spec: EnvSpec, name: str) -> None:
        self.name = name
        self.hung = self.late = 0
        self._spec = spec
        self._idle: list[EnvHandle] = []

    async def borrow(self) -> "EnvHandle":
        """An instance for one trajectory, a new one if none is idle.

        Raises:
            SpecError, EnvError: As `make_env`.
        """
        if self._idle:
            return self._idle.pop()
        thread = _EnvThread(self.name, self._note_late)
        try:
            env = await thread.call(make_env, self._spec, self.name)
        except BaseException:
            thread.stop()
            raise
        return EnvHandle(self.name, env, thread)

    def give_back(self, handle: "EnvHandle") -> None:
        """Let the next trajectory have it."""
        self._idle.append(handle)

    def discard(self, handle: "EnvHandle") -> None:
        """Never use it again; a call that still runs is abandoned."""
        self.hung += handle.hangs
        handle.close()

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()

    def _note_late(self) -> None:
        self.late += 1


class EnvHandle:
    """One instance with its thread; checks what its methods return."""

    def __init__(self, name: str, env: Any, thread: "_EnvThread") -> None:
        self._name, self._env, self._thread = name, env, thread

    @property
    def hangs(self) -> bool:
        """Whether a blocking call is running that nothing can end."""
        return self._thread.busy and not isinstance(self._env, ProcessEnv)

    async def reset(self, task: Task) -> Observation:
        """`Env.reset`, its result checked.

        Raises:
            EnvError: It returned something else than an Observation or a text.
        """
        return self._observation(await self._call(self._env.reset, task), "reset")

    async def step(self, completion: Completion) -> Transition:
        """`Env.step`, its result checked.

        Raises:
            EnvError: It returned something else than a Transition, or a reward that is no number.
        """
        result = await self._call(self._env.step, completion)
        if not isinstance(result, Transition):
            raise EnvError(f"step() of env {self._name} must return a Transition; got {type(result).__name__}")
        observation = result.observation
        if observation is not None:
            observation = self._observation(observation, "step")
        elif not (result.terminated or result.truncated):
            raise EnvError(f"step() of env {self._name} neither ended the trajectory nor gave an observation")
        return Transition(
            reward=self._reward(result.reward),
            observation=observation,
            terminated=bool(result.terminated),
            truncated=bool(result.truncated),
            info=_mapping(result.info, f"step() of env {self._name}"),
        )

    def close(self) -> None:
        """Close the instance, in its own thread after what it is doing, or at once if it is a process that hangs."""
        if self._thread.busy and isinstance(self._env, ProcessEnv):
            self._env.kill()
        close = getattr(self._env, "close", None)
        if inspect.iscoroutinefunction(close):
            task = asyncio.get_running_loop().create_task(_quietly_awaited(close()))
            _closing.add(task)
            task.add_done_callback(_closing.discard)
            close = None
        self._thread.stop(close if callable(close) else None)

    async def _call(self, method: Callable[..., Any], argument: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(argument)
        result = await self._thread.call(method, argument)
        return await result if inspect.iscoroutine(result) else result

    def _observation(self, value: Any, method: str) -> Observation:
        if isinstance(value, str):
            value = Observation.user(value)
        if isinstance(value, Transition):
            raise EnvError(f"{method}() of env {self._name} gave a Transition: a trajectory cannot end before a step")
        if not isinstance(value, Observation):
            raise EnvError(
                f"{method}() of env {self._name} must give an Observation or a text; got {type(value).__name__}"
            )
        if not value.messages:
            raise EnvError(f"{method}() of env {self._name} gave an observation without a message")
        _mapping(value.info, f"{method}() of env {self._name}")
        for message in value.messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise EnvError(f"{method}() of env {self._name} gave a message without a role; got {message!r:.200}")
            if isinstance(text := message.get("content"), str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise EnvError(
                        f"{method}() of env {self._name} gave text that no tokenizer takes, a lone surrogate at "
                        f"{error.start}: {text[max(0, error.start - 20) : error.start + 20]!a}"
                    ) from None
        return value

    def _reward(self, value: Any) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
            value = value.item()  # a tensor or array with one element
        if not isinstance(value, numbers.Real):
            raise EnvError(f"step() of env {self._name} gave a reward that is no number; got {value!r:.200}")
        reward = float(value)
        return math.nan if math.isnan(reward) else reward


class _EnvThread:
    """A daemon thread that runs one env's blocking calls: a hung one can be left behind and holds up no exit."""

    def __init__(self, name: str, on_late: Callable[[], None]) -> None:
        self.busy = False
        self._on_late = on_late
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"env {name}", daemon=True).start()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def job() -> None:
            try:
                result, error = function(*args, **kwargs), None
            except BaseException as raised:  # noqa: BLE001 - goes to whoever awaits
                if isinstance(raised, StopIteration):  # which a future refuses
                    raised = RuntimeError(f"StopIteration: {raised}")
                result, error = None, raised
            self.busy = False  # before the answer is heard, which may be a reason to look
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._answer, answer, result, error)

        self._jobs.put(job)
        return await answer

    def stop(self, last: Callable[[], Any] | None = None) -> None:
        if last is not None:
            self._jobs.put(lambda: _quietly(last))
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.busy = True
            job()

    def _answer(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        if future.done():  # given up: too late
            self._on_late()
        elif error is None:
            future.set_result(result)
        elif isinstance(error, Exception):
            future.set_exception(error)
        else:  # SystemExit and the like must end a trajectory, not the loop
            future.set_exception(EnvError(f"{type(error).__name__}: {error}"))


def _mapping(info: Any, who: str) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise EnvError(f"{who} gave an info that is no mapping; got {type(info).__name__}")
    return info


_closing: set[asyncio.Task[None]] = set()  # the loop holds tasks weakly


async def _quietly_awaited(closing: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(Exception):
        await closing


def _quietly(close: Callable[[], Any]) -> None:
    # What close() raises concerns nobody: the trajectories are done.
    with contextlib.suppress(Exception):
        close()
