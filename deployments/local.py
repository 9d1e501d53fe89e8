"""A Prefect server and worker on this machine that run the deployment `collect/local`.

    python deployments/local.py start     make deployment
    python deployments/local.py stop      make stop
    python deployments/local.py status    exit code 1 unless both run

`start` brings up what is missing: the server (on 127.0.0.1, port 4200 or a free one), the worker, which also makes its
work pool, then the deployment of prefect.yaml. `stop` ends the worker with its flow runs, then the server. Database,
logs and process ids are in .deployment/: deleting that folder while nothing runs forgets everything.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

REPO = Path(__file__).resolve().parents[1]
STATE = REPO / ".deployment"
PREFECT_HOME = STATE / "prefect"
PIDS = STATE / "pids.json"
POOL = "llmcollect-local"
WORKER = "local"
START_TIMEOUT_S = 180.0  # a server with a new database took 26 to 34 s on two busy cores
STOP_TIMEOUT_S = 10.0


def recorded() -> dict[str, Any]:
    """What `start` wrote: the URL of the API; pid and start time of server and worker."""
    return json.loads(PIDS.read_text()) if PIDS.exists() else {}


def record(**news: Any) -> None:
    PIDS.write_text(json.dumps(recorded() | news, indent=2) + "\n")


def running(name: str) -> psutil.Process | None:
    """The recorded process, if it lives: a pid may have been given to another one, which started at another time."""
    entry = recorded().get(name)
    with suppress(psutil.NoSuchProcess):
        if entry and (process := psutil.Process(entry["pid"])).create_time() == entry["started"]:
            return process if process.status() != psutil.STATUS_ZOMBIE else None
    return None


def log_file(name: str) -> Path:
    return STATE / f"{name}.log"


def environment(url: str) -> dict[str, str]:
    """The user's environment, this server's address and home, and defaults for what the user left open."""
    defaults = {
        # Prefect 3.7 would put the first two into ~/.prefect whatever PREFECT_HOME says, the third into site-packages.
        "PREFECT_LOCAL_STORAGE_PATH": str(PREFECT_HOME / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(PREFECT_HOME / "memo_store.toml"),
        "PREFECT_UI_STATIC_DIRECTORY": str(PREFECT_HOME / "ui"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "LLMCOLLECT_BASE": str(REPO / "runs"),
    }
    env = defaults | os.environ | {"PREFECT_API_URL": url, "PREFECT_HOME": str(PREFECT_HOME)}
    env.pop("PREFECT_PROFILE", None)  # it names a profile of the user's own home
    return env


def free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 4200))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(name: str, *args: str, env: Mapping[str, str]) -> None:
    # A worker that inherits an ignored SIGINT (from `make deployment &` in a script) can only be killed: it turns
    # SIGTERM into SIGINT. A handler, unlike SIG_IGN, is reset to the default in the child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "prefect", *args]
    with log_file(name).open("a") as log:
        child = subprocess.Popen(
            command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    record(**{name: {"pid": child.pid, "started": psutil.Process(child.pid).create_time()}})


def wait_for(name: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        log = log_file(name)
        if not running(name):
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
            sys.exit(f"error: the {name} ended before it was ready; {log} ends: {last_line}")
        if time.monotonic() > deadline:
            sys.exit(f"error: the {name} is not ready after {START_TIMEOUT_S:.0f} s; see {log}")
        time.sleep(0.5)


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    """POST to the API; None if the server does not answer or refuses."""
    try:
        answer = httpx.post(f"{url}/{path}", json=body, timeout=10, trust_env=False)
    except httpx.TransportError:
        return None
    return answer.json() if answer.is_success else None


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def online(url: str, since: datetime) -> bool:
    """Whether the worker has called in since then; an earlier worker of the same name counts as online for a while."""
    workers = ask(url, f"work_pools/{POOL}/workers/filter", {}) or []
    return any(w["name"] == WORKER and datetime.fromisoformat(w["last_heartbeat_time"]) >= since for w in workers)


def deploy(env: Mapping[str, str]) -> None:
    command = ["-m", "prefect", "--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all"]
    done = subprocess.run([sys.executable, *command], cwd=REPO, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nerror: prefect deploy ended with code {done.returncode}")


def start() -> None:
    PREFECT_HOME.mkdir(parents=True, exist_ok=True)
    if running("server"):
        print(f"server: already running at {recorded()['url']}")
    else:
        end("worker")  # it would go on asking the server that is gone
        port = free_port()
        print(f"server: starting on port {port} (half a minute the first time) ...", flush=True)
        record(url=f"http://127.0.0.1:{port}/api")
        # With SQLite, 3.7 logs a traceback at nearly every poll of a worker, for a "database is locked" that its next
        # try cures (PrefectHQ/prefect#23051). Prefect's and uvicorn's own loggers do not heed the root's level.
        env = {"PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL"} | environment(recorded()["url"])
        launch("server", "server", "start", "--host", "127.0.0.1", "--port", str(port), env=env)
    url: str = recorded()["url"]
    env = environment(url)
    wait_for("server", lambda: healthy(url))

    if running("worker"):
        print(f"worker: already running in pool {POOL}")
    else:
        print(f"worker: starting in pool {POOL} ...", flush=True)
        since = datetime.now(UTC)
        launch("worker", "worker", "start", "--pool", POOL, "--type", "process", "--name", WORKER, env=env)
        wait_for("worker", lambda: online(url, since))

    deploy(env)
    prefect = os.path.relpath(Path(sys.executable).parent / "prefect")
    print(f"deployed collect/local; its runs go to {env['LLMCOLLECT_BASE']}\n\nNext:")
    print(f"  export PREFECT_API_URL={url}")
    print(f"  {prefect} deployment run collect/local --watch")
    print(f"\nUI: {url.removesuffix('/api')}    logs: {os.path.relpath(STATE)}/*.log    end it all: make stop")


def end(name: str) -> None:
    """End a recorded process with all that it has started."""
    leader = running(name)
    if leader is None:
        return
    family = [leader, *leader.children(recursive=True)]
    leader.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
    print(f"{name}: ended" + (f", {len(alive)} of its processes by SIGKILL" if alive else ""))


def close_flow_runs(url: str) -> None:
    """Without a worker nobody would ever end the runs that were going on."""
    unfinished = {"flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}}
    for run in ask(url, "flow_runs/filter", unfinished) or []:
        state = {"type": "CANCELLED", "message": "ended by `make stop`; the same root goes on where this run stopped"}
        ask(url, f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
        print(f"flow run {run['name']}: cancelled")


def stop() -> None:
    if not running("worker") and not running("server"):
        print("nothing is running")
    end("worker")
    if running("server"):
        close_flow_runs(recorded()["url"])
    end("server")
    PIDS.unlink(missing_ok=True)


def status() -> None:
    for name in ("server", "worker"):
        process = running(name)
        print(f"{name}: {f'running, pid {process.pid}' if process else 'not running'}")
    if not (running("server") and running("worker")):
        sys.exit(1)
    url = recorded()["url"]
    print(f"API: {url}, which {'is healthy' if healthy(url) else 'does not answer'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Prefect server and worker on this machine for collect/local.")
    parser.add_argument("command", choices=["start", "stop", "status"])
    {"start": start, "stop": stop, "status": status}[parser.parse_args().command]()
