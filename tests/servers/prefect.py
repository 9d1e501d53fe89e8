"""A Prefect server with a worker and the project's deployments, as `make deployment` starts them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

REPO = Path(__file__).resolve().parents[2]


class Deployment:
    """A checkout in a temporary folder, its server and worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("flows", "tasks", "deployments"):
            shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "LLMCOLLECT_"))}
        self.environment["PYTHONPATH"] = str(REPO)  # the tests' own envs and policies
        out = self.local("start")
        found = re.search(r"export PREFECT_API_URL=(\S+)", out)
        assert found, out
        self.url = found[1]
        self.environment |= {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(folder / "client")}

    def local(self, command: str) -> str:
        script = self.folder / "deployments" / "local.py"
        return self.run(sys.executable, str(script), command)

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def prefect(self, *arguments: str, code: int = 0) -> str:
        return self.run(sys.executable, "-m", "prefect", *arguments, code=code)

    def ask(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.url}/{path}/filter", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Deployment]:
    """A deployment until the block's end, which leaves no process behind."""
    made = Deployment(folder)
    recorded = json.loads((made.folder / ".deployment" / "pids.json").read_text())
    processes = [psutil.Process(entry["pid"]) for entry in recorded.values() if isinstance(entry, dict)]
    processes += [child for process in processes for child in process.children(recursive=True)]
    yield made
    made.local("stop")
    assert len(processes) >= 2, "a server and a worker"
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
