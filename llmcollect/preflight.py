"""What can be checked before an engine starts, which takes half a minute or more."""

import contextlib
import inspect
import os

from llmcollect.envs.pool import make_env
from llmcollect.errors import LLMCollectError, SpecError
from llmcollect.run import RunSpec
from llmcollect.shard import Root
from llmcollect.store.files import open_files
from llmcollect.store.record import create_or_check_run


def check_components(spec: RunSpec) -> tuple[str, ...]:
    """Make each env and each policy once, and let it go: the fingerprints of the policies.

    Raises:
        SpecError: A target cannot be imported or does not take its kwargs, or a model does not exist.
        EnvError: An env's constructor raised.
    """
    for env, name in zip(spec.envs, spec.env_names, strict=True):
        close = getattr(make_env(env, name), "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            with contextlib.suppress(Exception):
                close()
    fingerprints = []
    for policy, name in zip(spec.policies, spec.policy_names, strict=True):
        constructor = policy.constructor()
        try:
            fingerprints.append(str(constructor(**policy.kwargs).fingerprint()))
        except LLMCollectError:
            raise
        except Exception as error:
            raise SpecError(f"policy {name} could not be made: {type(error).__name__}: {error}") from error
    return tuple(fingerprints)


def open_root(spec: RunSpec, root: str | os.PathLike[str]) -> Root:
    """Check the spec and make the root its home.

    Raises:
        SpecError: As `check_components`; RunMismatchError if the root holds another run.
        StoreError: The root cannot be written.
    """
    files = open_files(root)
    return Root(files, create_or_check_run(files, spec, check_components(spec)))
