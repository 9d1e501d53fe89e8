"""Keeps the chatter of the libraries below out of the way, unless `LLMCOLLECT_VERBOSE` asks for it."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

from llmcollect.settings import Settings

# Read by the libraries when they are imported, and by the processes that they start.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "PYTHONWARNINGS": "ignore",
}


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the block, and in processes started in it, libraries say nothing below an error."""
    if Settings().verbose:
        yield
        return
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    loggers = [logging.getLogger(name) for name in ("vllm", "transformers", "torch")]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        for logger in loggers:
            logger.setLevel(logging.ERROR)  # vLLM's own set-up, at its import, has changed them
