"""ProcessEnv: an env in a process of its own, with the methods of the env.

    ProcessEnv.step(...) -> pipe -> _serve (spawned) -> Env.step(...) -> pipe -> result, or the error that it raised

A crash or a hang there costs one trajectory: the call raises, the instance is discarded and its process killed. The
process ends by itself when its parent is gone, for its pipe is closed then.
"""

import asyncio
import contextlib
import json
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from llmcollect import canonical_json
from llmcollect.envs.base import require_methods
from llmcollect.errors import EnvError, portable
from llmcollect.types import Completion, Observation, Task, Transition

_CLOSE_S = 5.0


class RemoteTraceback(Exception):
    """The traceback of the other process, as the cause of the error that was raised there."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class ProcessEnv:
    """An env behind a pipe; its methods block.

    Raises:
        EnvError: The process could not be started.
        Exception: What the constructor raised.
    """

    def __init__(self, constructor: Callable[..., Any], kwargs: dict[str, Any], name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, constructor, kwargs, name), name=f"env {name}", daemon=True
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvError(
                f"env {name} cannot have a process of its own: its constructor must be importable from there; {error}"
            ) from error
        theirs.close()  # so that its end is seen here
        try:
            self._call("make", None)
        except BaseException:
            self.kill()
            raise

    def reset(self, task: Task) -> Any:
        """`Env.reset` there."""
        return self._call("reset", task)

    def step(self, completion: Completion) -> Any:
        """`Env.step` there."""
        return self._call("step", completion)

    def close(self) -> None:
        """`Env.close` there, and the end of the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", None))
        self._process.join(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End the process whatever it does; a call that waits for it raises. From any thread."""
        with contextlib.suppress(ValueError):  # closed already
            self._process.kill()

    def _call(self, method: str, argument: Any) -> Any:
        try:
            self._pipe.send((method, argument))
            result, error, trace = self._pipe.recv()
        except (EOFError, OSError) as gone:
            self._process.join(_CLOSE_S)
            raise EnvError(
                f"the process of env {self._name} ended with exit code {self._process.exitcode} during {method}()"
            ) from gone
        if error is not None:
            raise error from RemoteTraceback(trace)
        return result


def _serve(pipe: Connection, constructor: Callable[..., Any], kwargs: dict[str, Any], name: str) -> None:
    """The process: makes the env, then answers one call after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    env: Any = None
    with asyncio.Runner() as runner, contextlib.suppress(EOFError, OSError):
        while True:
            method, argument = pipe.recv()
            error: BaseException | None = None
            result: Any = None
            trace = ""
            try:
                match method:
                    case "make":
                        env = constructor(**kwargs)
                        require_methods(env, name)
                    case "close":
                        if callable(close := getattr(env, "close", None)):
                            _settled(close(), runner)
                        return
                    case _:
                        result = _settled(getattr(env, method)(argument), runner)
            except Exception as raised:  # noqa: BLE001 - goes to whoever called
                error, trace = raised, traceback.format_exc()
            pipe.send((_portable(result), None if error is None else portable(error, EnvError), trace))


def _settled(value: Any, runner: asyncio.Runner) -> Any:
    return runner.run(value) if asyncio.iscoroutine(value) else value


def _portable(result: Any) -> Any:
    """The result, or, if its info cannot be pickled, the result with the info as it will be stored."""
    try:
        pickle.dumps(result)
    except Exception:  # noqa: BLE001 - objects may refuse in any way
        if isinstance(result, Transition):
            observation = result.observation
            return replace(
                result,
                info=_as_stored(result.info),
                observation=_portable(observation) if isinstance(observation, Observation) else observation,
            )
        if isinstance(result, Observation):
            return replace(result, info=_as_stored(result.info))
        return f"<{type(result).__name__} that cannot be sent>"
    return result


def _as_stored(info: Any) -> Any:
    return json.loads(canonical_json.dumps(dict(info)))
