"""The S3 server of the tests: a real Ceph where it is installed, else moto's."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import ceph

IS_CEPH = ceph.is_installed() and os.environ.get("TESTS_S3") != "moto"
NAME = "Ceph radosgw" if IS_CEPH else "moto (TESTS_S3 asks for it, or Ceph is not installed: `make ceph`)"


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables for a server that runs within the block."""
    if IS_CEPH:
        with ceph.running(folder) as url:
            yield ceph.environment(url)
    else:
        with _moto() as url:
            yield ceph.environment(url)


@contextmanager
def _moto() -> Iterator[str]:
    port = ceph.free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()
