"""Every example runs: with a fake policy each, and the README's own with the model that it names."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import BytePolicy

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "steps"), [("own_env", 64), ("dataset", 24), ("game", 16)])
def test_an_example_runs(name: str, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(name).main(BytePolicy) == steps
    assert capsys.readouterr().out.count("\n") >= 3


@pytest.mark.slow
@pytest.mark.engine
def test_the_example_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    script = str(EXAMPLES / "iterate.py")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "64 steps in runs/demo"
    assert [line.split()[0] for line in lines if "sampled tokens" in line] == ["16"] * 4
    assert list((tmp_path / "runs" / "demo" / "steps").rglob("*.parquet"))
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["runs"]
