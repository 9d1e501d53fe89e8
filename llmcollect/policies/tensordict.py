"""TensorDictPolicy: a callable from TensorDict to TensorDict, such as TorchRL's wrappers, as a policy.

prompts of waiting envs -> one batch ("tokens", "prompt") -> callable, in one thread -> ("tokens", "response") -> each
"""

import asyncio
import functools
import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcollect.components import ComponentSpec
from llmcollect.errors import PolicyError, PromptTooLongError, SpecError
from llmcollect.rendering import ChatRenderer, Conversation, Tools
from llmcollect.run import Sampling
from llmcollect.types import Generation

_VERSION_KEYS = (("policy", "version"), "policy_version")


class TensorDictPolicy:
    """Any `Callable[[TensorDict], TensorDict]` that generates: TorchRL's `TransformersWrapper`, `vLLMWrapper`, yours.

    It gets a lazy stack of batch size [B], 1 <= B <= max_batch, whose rows differ in length:

    - `("tokens", "prompt")`: int64 [length], not padded; `.get(key, as_padded_tensor=True, padding_side="left")` pads.
    - `("masks", "all_attention_mask")`: bool [length], all True.

    and gives a TensorDict of batch size [B], the same or another, padded or not, with

    - `("tokens", "response")`: integers [length]. What follows the first id that ends a turn is cut off, and so are
      padding ids at the end.
    - `("log_probs", "response")`: floats of the same length; without the entry the rows have no log-probs.
    - `("policy", "version")` or `"policy_version"`: an integer a row, the version that sampled; else it is 0.

    The wrappers are made with `input_mode="tokens"`, `generate=True` and `num_samples=None`. As of TorchRL 0.14:

    - TransformersWrapper is best made with `pad_output=True`: else it drops each sampled id that equals the padding
      id, which is also the end of a turn where the padding token is that of the end.
    - It reports 0 as the log-prob of each response's first token, and log-probs before temperature; they are kept as
      they come.
    - vLLMWrapper takes rows that differ in length with `pad_output=False` alone, and drops ids from prompts that equal
      the padding id: its tokenizer needs a padding token that nothing else is.

    **The callable samples as it was told when it was made**: a run's `Sampling` and its seeds are not applied to it,
    and `max_tokens` cuts nothing; a warning says so where a run asks for another `Sampling` than the default. Give
    `generate_kwargs` to the wrapper.

    One forward runs at a time, in a thread that belongs to the policy. A callable that raises fails the requests of its
    batch alone.

    Args:
        constructor: A class or function that makes the callable, or its import path; called at the start, in that
            thread.
        tokenizer: For rendering: a folder or a name on the hub, a tokenizer of Hugging Face with a chat template, or a
            function that makes one. None: the callable's `tokenizer`.
        max_context: Most tokens of prompt and response. None: what the model's configuration or the tokenizer says.
        fingerprint: Which model this is. None: the constructor's import path with its kwargs; give one where they do
            not tell one model from another.
        max_batch: Most rows of a batch.
        max_wait_s: How long the first request of a batch waits for others.
        **kwargs: Those of the constructor.

    Raises:
        SpecError: An argument cannot be what was meant.
    """

    def __init__(
        self,
        constructor: str | Callable[..., Any],
        *,
        tokenizer: Any = None,
        max_context: int | None = None,
        fingerprint: str | None = None,
        max_batch: int = 32,
        max_wait_s: float = 0.01,
        **kwargs: Any,
    ) -> None:
        if max_batch < 1 or max_wait_s < 0:
            raise SpecError(f"max_batch must be at least 1 and max_wait_s at least 0; got {max_batch}, {max_wait_s}")
        spec = ComponentSpec.of(constructor)
        self._spec = ComponentSpec.of(spec, kwargs={**spec.kwargs, **kwargs})
        self._tokenizer, self._max_context, self._fingerprint = tokenizer, max_context, fingerprint
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._callable: Any = None
        self._renderer: ChatRenderer | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._pad_id: int | None = None
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._batches: asyncio.Task[None] | None = None
        self._warned = False

    def fingerprint(self) -> str:
        """The name that was given, or the constructor's import path with its kwargs.

        Raises:
            SpecError: The kwargs are not JSON, and no name was given.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        try:
            return f"{self._spec.target}({json.dumps(self._spec.kwargs, sort_keys=True)})"
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"TensorDictPolicy cannot name its model by kwargs that are not JSON ({error}): pass fingerprint="
            ) from error

    async def start(self) -> None:
        """Make the callable, and load the tokenizer.

        Raises:
            PolicyError: The constructor raised, or there is no tokenizer, or no length of the context to be found.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmcollect forward")
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._start)
        except BaseException as error:
            self._thread.shutdown(wait=False)
            if not isinstance(error, Exception) or isinstance(error, SpecError | PolicyError):
                raise
            raise PolicyError(f"{self._spec.target} could not be made: {_one_line(error)}") from error
        self._batches = asyncio.create_task(self._run_batches())

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and response."""
        assert self._max_context is not None, "start() comes first"
        return self._max_context

    def conversation(self, tools: Tools = None) -> Conversation:
        """An empty conversation of the tokenizer's chat template."""
        assert self._renderer is not None, "start() comes first"
        return Conversation(self._renderer, tools)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        """Sample one response, in a batch with what else is waiting; what is cancelled before that is left out.

        Raises:
            PromptTooLongError: The prompt fills the context.
            PolicyError: The callable raised, or gave something else than was asked for; or the policy was closed.
        """
        if self._batches is None or self._batches.done():
            raise PolicyError("the policy was closed")
        if len(prompt_ids) >= self.max_context:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context holds {self.max_context}"
            )
        if not self._warned and sampling != Sampling():
            self._warned = True
            warnings.warn(
                f"{self._spec.target} samples as it was told when it was made: {sampling!r} is not applied",
                stacklevel=2,
            )
        request = _Request(list(prompt_ids), asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.append(request)
        self._arrived.set()
        return await request.answer

    async def close(self) -> None:
        """Let a forward that runs come to its end, fail what waits, and free the callable."""
        if self._batches is not None:
            self._batches.cancel()
            await asyncio.wait([self._batches])
        for request in self._waiting:
            request.fail("the policy was closed")
        self._waiting.clear()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
        self._callable = None

    def _start(self) -> None:
        self._callable = self._spec.build()
        if not callable(self._callable):
            raise PolicyError(f"{self._spec.target} made a {type(self._callable).__name__}, which is not callable")
        tokenizer = self._find_tokenizer()
        self._renderer = ChatRenderer(tokenizer)
        self._end_ids = frozenset([*self._renderer.stop_token_ids, *_ids(tokenizer.eos_token_id)])
        self._pad_id = tokenizer.pad_token_id
        self._max_context = self._max_context or _context_length(self._callable, tokenizer)

    def _find_tokenizer(self) -> Any:
        given = self._tokenizer
        if given is None:
            given = getattr(self._callable, "tokenizer", None)
            if given is None:
                raise PolicyError(f"what {self._spec.target} made has no tokenizer: pass tokenizer=")
        elif isinstance(given, str | Path):
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(Path(given).expanduser()) if Path(given).exists() else given)
        elif not hasattr(given, "apply_chat_template"):  # a tokenizer can be called, too
            given = given()
        return given

    async def _run_batches(self) -> None:
        """One batch after the other, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            forward = functools.partial(self._forward, [request.prompt_ids for request in batch])
            running = loop.run_in_executor(self._thread, forward)
            try:
                results = await running
            except asyncio.CancelledError:
                for request in batch:
                    request.fail("the policy was closed")
                raise
            except Exception as error:  # noqa: BLE001 - whatever the callable raises ends this batch alone
                for request in batch:
                    request.fail(_one_line(error), error)
                continue
            for request, result in zip(batch, results, strict=True):
                if isinstance(result, PolicyError):
                    request.fail(str(result))
                elif not request.answer.done():
                    request.answer.set_result(result)

    async def _next_batch(self) -> list["_Request"]:
        """At least one request that somebody waits for; more until there are enough, or the first has waited enough."""
        while True:
            self._waiting = deque(request for request in self._waiting if not request.answer.done())
            if len(self._waiting) >= self._max_batch:
                break
            wait_s = self._waiting[0].since + self._max_wait_s - time.monotonic() if self._waiting else None
            if wait_s is not None and wait_s <= 0:
                break
            self._arrived.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        return [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]

    def _forward(self, prompts: list[list[int]]) -> list[Generation | PolicyError]:
        """One call, in the thread."""
        import torch
        from tensordict import TensorDict, lazy_stack

        rows = []
        for prompt in prompts:
            ids = torch.tensor(prompt, dtype=torch.int64)
            mask = torch.ones(len(prompt), dtype=torch.bool)
            rows.append(TensorDict({"tokens": {"prompt": ids}, "masks": {"all_attention_mask": mask}}))
        with torch.no_grad():
            out = self._callable(lazy_stack(rows))
        size = getattr(out, "batch_size", None)
        if size is None or tuple(size) != (len(prompts),):
            given = type(out).__name__ if size is None else f"one of batch size {list(size)}"
            raise PolicyError(f"the callable must give a TensorDict of batch size [{len(prompts)}]; got {given}")
        return [self._generation(row) for row in out.unbind(0)]

    def _generation(self, row: Any) -> Generation | PolicyError:
        """A row of the result; the error, if it is that row's alone."""
        response = row.get(("tokens", "response"), None)
        if response is None:
            return PolicyError("the callable gave no ('tokens', 'response')")
        ids = [int(i) for i in response.flatten().tolist()]
        logprobs = row.get(("log_probs", "response"), None)
        if logprobs is not None:
            logprobs = logprobs.flatten().tolist()
            if len(logprobs) != len(ids):
                return PolicyError(f"the callable gave {len(ids)} ids in a response and {len(logprobs)} log-probs")
        length = _length(ids, self._end_ids, self._pad_id)
        ids = ids[:length]
        version = _version(row)
        if isinstance(version, PolicyError):
            return version
        return Generation(
            token_ids=ids,
            logprobs=None if logprobs is None else logprobs[:length],
            policy_versions=[(version, length)],
            finish_reason="stop" if ids and ids[-1] in self._end_ids else "length",
        )


@dataclass(slots=True)
class _Request:
    """A prompt that somebody waits for an answer to."""

    prompt_ids: list[int]
    answer: "asyncio.Future[Generation]"
    since: float

    def fail(self, why: str, cause: BaseException | None = None) -> None:
        if not self.answer.done():
            error = PolicyError(why)
            error.__cause__ = cause
            self.answer.set_exception(error)


def _length(ids: Sequence[int], end_ids: frozenset[int], pad_id: int | None) -> int:
    """How much of a padded response was sampled."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return position + 1
    length = len(ids)
    while length and ids[length - 1] == pad_id:
        length -= 1
    return length


def _version(row: Any) -> int | PolicyError:
    for key in _VERSION_KEYS:
        value = row.get(key, None)
        if value is None:
            continue
        value = row[key]  # without the container of what is no tensor
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, int):
            return PolicyError(f"a policy version must be an integer; got {value!r:.100}")
        return value
    return 0


def _context_length(model: Any, tokenizer: Any) -> int:
    """What the configuration of the wrapped model says, be it of transformers or of vLLM, else the tokenizer."""
    inner = getattr(model, "model", model)
    for path in ("config.max_position_embeddings", "llm_engine.model_config.max_model_len"):
        try:
            return int(functools.reduce(getattr, path.split("."), inner))
        except (AttributeError, TypeError, ValueError):
            continue
    length = getattr(tokenizer, "model_max_length", None)
    if not isinstance(length, int) or length > 1 << 31:  # a tokenizer that knows none says 1e30
        raise PolicyError("neither model nor tokenizer says how long a context may be: pass max_context=")
    return length


def _ids(ids: int | Sequence[int] | None) -> Sequence[int]:
    return [ids] if isinstance(ids, int) else ids or ()


def _one_line(error: BaseException) -> str:
    if isinstance(error, PolicyError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
