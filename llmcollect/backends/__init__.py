"""Where shards run.

local     on this process's engine thread
ray       in Ray actors, one a policy replica
prefect   in a flow run of a deployment, followed by way of the store
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from llmcollect.backends.base import Backend, BackendOptions
from llmcollect.backends.local import LocalOptions
from llmcollect.backends.prefect import PrefectOptions
from llmcollect.backends.ray import RayOptions
from llmcollect.errors import SpecError
from llmcollect.run import explain

__all__ = ["Backend", "BackendOptions", "make_options"]

_BACKENDS: dict[str, type[BackendOptions]] = {"local": LocalOptions, "ray": RayOptions, "prefect": PrefectOptions}


def make_options(name: str, options: Mapping[str, Any] | None) -> BackendOptions:
    """The options of a backend, checked.

    Raises:
        SpecError: There is no such backend, or it has no such option.
    """
    if name not in _BACKENDS:
        raise SpecError(f"backend must be one of {', '.join(map(repr, _BACKENDS))}; got {name!r}")
    try:
        return _BACKENDS[name].model_validate(dict(options or {}))
    except ValidationError as error:
        raise SpecError(f"backend_options of {name!r} are not valid: {explain(error)}") from error
