"""A real S3 server: a one-node Ceph (monitor, one OSD in memory, radosgw) in a temporary folder, on loopback.

It needs the system's packages radosgw, ceph-mon and ceph-osd (`make ceph`), and no privileges. Everything is in
memory, so it is ended with SIGKILL, by process id.
"""

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ACCESS_KEY = "testkey"
SECRET_KEY = "testsecret-never-to-be-seen"
STRANGER = {"AWS_ACCESS_KEY_ID": "strangerkey", "AWS_SECRET_ACCESS_KEY": "strangersecret"}
"""Another user of the server."""

_CONF = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}/run
admin socket = {folder}/run/$name.$pid.asok
crash dir = {folder}
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
mon data avail warn = 1
mon data avail crit = 1
ms bind ipv6 = false
# radosgw asks for secure by default, which never connects without cephx.
ms mon client mode = crc
[mon]
mon data = {folder}/mon
paxos propose interval = 0.05
mon osd min down reporters = 1
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush update on start = true
osd class update on start = false
[client]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
rgw run sync thread = false
rgw thread pool size = 64
"""


def is_installed() -> bool:
    """Whether the system has what the server needs."""
    return all(shutil.which(name) for name in ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph"))


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """The server's URL while it runs.

    Raises:
        RuntimeError: It did not start; its output is in the message.
    """
    port, mon_port = free_port(), free_port()
    fsid, conf = str(uuid.uuid4()), folder / "ceph.conf"
    for name in ("mon", "osd", "rgw", "run"):
        (folder / name).mkdir(parents=True)
    conf.write_text(_CONF.format(folder=folder, fsid=fsid, port=port, mon_port=mon_port))
    servers: list[subprocess.Popen[bytes]] = []

    def call(*command: str) -> None:
        done = subprocess.run([*command], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")

    def serve(name: str, *command: str) -> None:
        with open(folder / f"{name}.out", "wb") as out:
            servers.append(subprocess.Popen([*command], stdin=subprocess.DEVNULL, stdout=out, stderr=out))

    try:
        address = f"[v2:127.0.0.1:{mon_port}]"
        call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, f"{folder}/monmap")
        call("ceph-mon", "-c", f"{conf}", "-i", "a", "--mkfs", "--monmap", f"{folder}/monmap")
        serve("mon", "ceph-mon", "-c", f"{conf}", "-i", "a", "-f")
        osd = str(uuid.uuid4())
        call("ceph", "-c", f"{conf}", "--connect-timeout", "20", "osd", "new", osd, "0")
        call("ceph-osd", "-c", f"{conf}", "-i", "0", "--mkfs", "--osd-uuid", osd)
        serve("osd", "ceph-osd", "-c", f"{conf}", "-i", "0", "-f")
        serve("rgw", "radosgw", "-c", f"{conf}", "-n", "client.rgw", "-f")
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, servers, folder)
        for name, key, secret in (("test", ACCESS_KEY, SECRET_KEY), ("stranger", *STRANGER.values())):
            admin = ("radosgw-admin", "-c", f"{conf}", "-n", "client.rgw", "user", "create")
            call(*admin, f"--uid={name}", f"--display-name={name}", "--access-key", key, "--secret-key", secret)
        yield url
    finally:
        for server in reversed(servers):
            server.kill()
            server.wait()


def environment(url: str) -> dict[str, str]:
    """What every AWS tool reads, for this server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        # Ceph 16 knows no checksums in trailers.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _wait_for(url: str, servers: list["subprocess.Popen[bytes]"], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError as error:
            if time.monotonic() > deadline or any(server.poll() is not None for server in servers):
                outputs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.out"))
                raise RuntimeError(f"the S3 server did not start:\n{outputs}") from error
            time.sleep(0.1)
        else:
            return


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
