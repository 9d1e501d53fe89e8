"""One tree of errors, named by the boundary that they crossed.

    LLMCollectError
    ├── SpecError           what the user asked for cannot be: exit code 2
    │   └── RunMismatchError    the root holds another run
    ├── StoreError          the file system
    │   └── CorruptFileError    a file of a run is not what its writer wrote
    ├── EnvError            an environment
    ├── PolicyError         a policy or its engine
    │   ├── PromptTooLongError  the context does not fit: ends one trajectory
    │   └── EngineDeadError     the engine has to be built anew: ends what it had in flight
    └── RunFailedError      too much of a run failed

A failed trajectory is data, not an error: it is recorded, and the run goes on until `max_failure_rate`.
Messages are one line: what is wrong, where, what to do.
"""

import contextlib
import pickle
from collections.abc import Iterator


class LLMCollectError(Exception):
    """Base of every error that llmcollect raises on purpose."""

    exit_code = 1


class SpecError(LLMCollectError):
    """The spec, or an argument, cannot be what was meant."""

    exit_code = 2


class RunMismatchError(SpecError):
    """The root holds a run whose identity differs from the spec that was given."""


class StoreError(LLMCollectError):
    """A root cannot be read or written."""


class CorruptFileError(StoreError):
    """A file of a run is damaged; the message names it."""


class EnvError(LLMCollectError):
    """An env could not be made, or broke its protocol."""


class PolicyError(LLMCollectError):
    """A policy could not be started, died, or broke its protocol."""


class PromptTooLongError(PolicyError):
    """The prompt leaves no room for a response within the model's context."""


class EngineDeadError(PolicyError):
    """The engine answers no more; trajectories start again on the one that replaces it."""


class RunFailedError(LLMCollectError):
    """So many trajectories failed that the run was stopped."""


@contextlib.contextmanager
def single_error() -> Iterator[None]:
    """Raise the first error of a task group as itself: the others follow from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


def portable(error: BaseException, otherwise: type[LLMCollectError]) -> BaseException:
    """The error, or, if it does not survive being pickled, one of another class that says the same."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 - objects may refuse in any way
        return otherwise(f"{type(error).__name__}: {error}")
