"""Fixtures: one tiny model, one vLLM engine and one of each server for the whole session."""

import os
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from llmcollect.components import ComponentSpec
from llmcollect.policies import VLLMPolicy
from llmcollect.policies.engines import Engine, engine_thread
from tests import tiny_model
from tests.servers import prefect, s3
from tests.servers.proxy import Proxy

settings.register_profile("project", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("project")

ENGINE_ARGS = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 64}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return tiny_model.make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Any:
    """The tiny model's tokenizer, by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="session")
def tiny_policy(tiny: Path) -> Any:
    """A constructor of the policy whose engine the `engine` fixture keeps up."""
    return partial(VLLMPolicy, str(tiny), **ENGINE_ARGS)


@pytest.fixture(scope="session")
def engine(tiny_policy: Any) -> Iterator[Engine]:
    """The one engine of the session: held by a lease, so that tests that name the same policy share it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small gains nothing from a second one
    ready = threading.Event()
    found: list[Engine] = []

    async def hold() -> None:
        import asyncio

        async with engine_thread().lease(ComponentSpec.of(tiny_policy), 64) as leased:
            found.append(leased)
            ready.set()
            await asyncio.Event().wait()

    job = engine_thread().submit(hold())
    while not ready.wait(0.5):
        if job.outcome.done():
            job.result()
    yield found[0]
    job.cancel()
    job.wait()


def pytest_report_header() -> str:
    return f"S3 server: {s3.NAME}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of the S3 server of the session."""
    with s3.running(tmp_path_factory.mktemp("s3") / "server") as environment:
        yield environment


@pytest.fixture
def bucket(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, with the environment set for its server."""
    import s3fs

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    name = f"b{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def proxy(bucket: str, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the S3 server, which the environment names from now on."""
    with Proxy(s3_server["AWS_ENDPOINT_URL"]).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[prefect.Deployment]:
    """The Prefect server and worker of the session."""
    folder = tmp_path_factory.mktemp("checkout")
    with prefect.running(folder) as made:
        yield made


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this machine, with more CPUs than it has: actors that mostly wait."""
    import ray

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, namespace="tests")
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _quiet_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test inherits a root, or a Prefect server, from the shell."""
    for name in ("LLMCOLLECT_BASE", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
