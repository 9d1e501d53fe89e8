"""Keeps the chatter of the libraries below out of the way, unless `LLMCOLLECT_VERBOSE` asks for it."""

import contextlib
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator

from llmcollect.settings import Settings

# Read by the libraries when they are imported, and by the processes that they start.
_ENVIRONMENT = {
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
        log_vllm()
        yield
        return
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    for name in ("vllm", "transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def log_vllm() -> None:
    """Write what vLLM logs to stderr: all of it if verbose, else errors. A plugin of its engine processes, too.

    vLLM would do so itself, by a `dictConfig` that first flushes and closes every handler of the process: the
    application's, and Prefect's, which waits there for a thread that waits for logging's lock. So that is switched
    off (VLLM_CONFIGURE_LOGGING), and in the process that collects the logging stays the application's.
    """
    logger = logging.getLogger("vllm")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("vllm %(process)d %(levelname)s %(asctime)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if Settings().verbose else logging.ERROR)


def log_vllm_of_engine() -> None:
    """`log_vllm` in an engine's own process."""
    if multiprocessing.parent_process() is not None:
        log_vllm()
