"""Ends the processes that a killed collection leaves behind: engines hold GPUs, and nobody else would free them.

vLLM's engine process and Prefect's embedded server do not notice when the process that started them is killed with
SIGKILL. Both load plugins at their start, and this module is one (entry points in pyproject.toml): in a direct child of
the process named by LLMCOLLECT_PARENT it waits for that parent to be gone, and leaves the terminal's process group, for
Ctrl-C is sent to all of that: the parent has rows to commit first, and ends its children itself. Anywhere else it does
nothing.
"""

import contextlib
import os
import signal
import threading
import time

PARENT = "LLMCOLLECT_PARENT"
_POLL_SECONDS = 1.0


def own_children() -> None:
    """Children of this process that are started from now on shall not outlive it."""
    os.environ[PARENT] = str(os.getpid())


def watch_parent() -> None:
    """In a child of a process that owns its children: end when that process has ended."""
    parent = os.getppid()
    if os.environ.get(PARENT) == str(parent):
        with contextlib.suppress(OSError):  # it leads a group already
            os.setpgid(0, 0)
        threading.Thread(target=_wait_for_orphanhood, args=(parent,), name="llmcollect parent", daemon=True).start()


def _wait_for_orphanhood(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
