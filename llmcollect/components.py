"""Constructors of envs and policies as data: an import path with keyword arguments.

functools.partial(ReasoningGymEnv, "gcd", max_value=12)
  <-> {"target": "llmcollect.envs:ReasoningGymEnv", "kwargs": {"dataset": "gcd", "max_value": 12}}
"""

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from llmcollect.errors import SpecError

_SECRET = re.compile(r"(^|_)(api_?key|secret|password|passwd|token|credentials?)$", re.IGNORECASE)


class ComponentSpec(BaseModel):
    """A constructor by import path.

    Attributes:
        target: `"package.module:Name"` of a class or function.
        kwargs: Its keyword arguments, JSON values alone; never secrets, which belong into environment variables.
        name: What rows and tables call it; derived from target and kwargs if not given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    target: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    name: str | None = None
    # The callable itself where the user handed one over: a class of `__main__` need not be importable again.
    _constructor: Callable[..., Any] | None = PrivateAttr(default=None)

    @field_validator("target")
    @classmethod
    def _looks_like_a_path(cls, target: str) -> str:
        module, _, name = target.partition(":")
        if not module or not name:
            raise ValueError(f'must look like "package.module:Name"; got {target!r}')
        return target

    @field_validator("kwargs")
    @classmethod
    def _no_secrets(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        for key, value in kwargs.items():
            if _SECRET.search(key) and isinstance(value, str):
                raise ValueError(f"{key!r} looks like a secret, and specs are stored: pass it by environment variable")
        return kwargs

    def __eq__(self, other: object) -> bool:
        # Two specs are equal as data, whether or not they also hold the callable.
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    @property
    def label(self) -> str:
        """`name`, or the class name with the first text among the kwargs: `ReasoningGymEnv:gcd`."""
        if self.name is not None:
            return self.name
        text = next((value for value in self.kwargs.values() if isinstance(value, str)), None)
        short = self.target.rpartition(":")[2].rpartition(".")[2]
        return f"{short}:{text[-60:]}" if text else short

    def constructor(self) -> Callable[..., Any]:
        """The callable that `target` names.

        Raises:
            SpecError: It cannot be imported, is not callable or does not take the kwargs.
        """
        constructor = self._constructor or import_target(self.target)
        if not callable(constructor):
            raise SpecError(f"{self.target} is not callable: name a class or a function that makes one")
        try:
            signature = inspect.signature(constructor)
        except ValueError:  # some builtins have none
            return constructor
        try:
            signature.bind(**self.kwargs)
        except TypeError as error:
            raise SpecError(
                f"{self.target} does not take these kwargs: {error}; its signature is {signature}"
            ) from None
        return constructor

    def build(self) -> Any:
        """Call the constructor."""
        return self.constructor()(**self.kwargs)

    @classmethod
    def of(cls, source: Any, **fields: Any) -> Self:
        """From a constructor: a class, a function, a `functools.partial` of one, an import path, a dict or a spec.

        Raises:
            SpecError: It is an instance, or a partial whose positional arguments have no names.
        """
        if isinstance(source, cls) and not fields:
            return source
        if isinstance(source, ComponentSpec):
            made = cls.model_validate({**source.model_dump(), **fields})
            made._constructor = source._constructor
            return made
        if isinstance(source, str):
            return cls(target=source, **fields)
        if isinstance(source, Mapping):
            return cls.model_validate({**source, **fields})
        if not callable(source):
            raise SpecError(
                f"expected a constructor (a class, a function, a functools.partial or an import path) but got an "
                f"instance of {type(source).__name__}: pass the class, with its arguments in functools.partial"
            )
        function, kwargs = _unwrap(source)
        made = cls(target=_path_of(function), kwargs=kwargs, **fields)
        made._constructor = function
        return made

    def require_stable(self, why: str) -> None:
        """Check that the spec can be written down.

        Raises:
            SpecError: It is a lambda or a closure, or has kwargs that are not JSON; says what to do instead.
        """
        if "<" in self.target:
            raise SpecError(
                f"{why} needs constructors with an import path, and {self.target} has none: "
                f"define a class or function at the top of a module, and pass its arguments in functools.partial"
            )
        try:
            same = json.loads(json.dumps(self.kwargs)) == _plain(self.kwargs)
        except (TypeError, ValueError):
            same = False
        if not same:
            raise SpecError(
                f"{why} needs kwargs that are plain JSON values, and those of {self.target} are not: "
                f"pass names or paths, and let the constructor make the objects; got {self.kwargs!r}"
            )


class EnvSpec(ComponentSpec):
    """An env's constructor, with the weight of its share of the groups.

    Attributes:
        weight: Share of the groups, relative to the other envs' weights.
        isolate: Where blocking calls run: "thread" gives each instance a thread of its own, "process" a process, for
            envs that may crash or hang, or that hold the interpreter lock. Operational: it may differ when a run is
            resumed.
    """

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    isolate: Literal["thread", "process"] = "thread"


def import_target(target: str) -> Any:
    """Import `"package.module:Name"`.

    Raises:
        SpecError: The module cannot be imported or has no such name.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise SpecError(f'an import path looks like "package.module:Name"; got {target!r}')
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(f"cannot import {target!r}: {error}; the path is package.module:Name") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [name for name in dir(found) if name[0].isupper()]
            raise SpecError(
                f"cannot import {target!r}: {module_name} has no {attribute!r}; it has {', '.join(public)}"
            ) from None
        except ImportError as error:
            raise SpecError(f"cannot import {target!r}: {error}") from error
    return found


def stable_path(function: Any) -> Any:
    """The import path of a function, or the function itself if it has none."""
    if isinstance(function, str) or not callable(function):
        return function
    path = _path_of(function)
    return function if "<" in path else path


def _unwrap(source: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The callable under a (nested) partial, with all of its arguments by name."""
    if not isinstance(source, functools.partial):
        return source, {}
    function = source.func  # nested partials are flattened by functools itself
    if not source.args:
        return function, dict(source.keywords)
    parameters = list(inspect.signature(function).parameters.values())
    named = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(source.args) > len(named):
        raise SpecError(f"pass the arguments of functools.partial({function.__qualname__}, ...) by keyword")
    return function, {**dict(zip(named, source.args, strict=False)), **source.keywords}


def _path_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or f"<instance of {type(function).__qualname__}>"
    # The public path where the package re-exports the name: shorter, and it survives a move inside the package.
    if module.startswith("llmcollect."):
        package = ".".join(module.split(".")[:2])
        if getattr(importlib.import_module(package), name, None) is function:
            module = package
    return f"{module}:{name}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
