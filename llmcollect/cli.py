"""The command `llmcollect`.

Exit codes: 0 done; 1 the run failed; 2 something was asked for that cannot be; 130 interrupted.
"""

import asyncio
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError
from rich.console import Console

from llmcollect.errors import CorruptFileError, LLMCollectError, RunFailedError, SpecError
from llmcollect.run import RunSpec

if TYPE_CHECKING:
    from llmcollect.store.reader import Run
    from llmcollect.summary import EnvSummary

app = App(
    name="llmcollect",
    help="Collect LLM rollouts, and look at them.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # it exits without a word
)


@app.command
def collect(
    *, root: str = "runs/collect", run: Path | None = None, num_groups: int | None = None, verbose: bool = False
) -> None:
    """Run the flow `collect` in this process, or what is still missing of its run.

    Parameters
    ----------
    root:
        Folder of the run.
    run:
        A JSON file with a RunSpec. Without one: the demo, SmolLM2 on chain_sum and gcd.
    num_groups:
        Size of the run; it may grow on a root that holds a smaller one.
    verbose:
        Let vLLM and Prefect log, and show tracebacks.
    """
    from llmcollect.preflight import open_root
    from llmcollect.store.reader import open_run

    _set_verbosity(verbose)
    spec = _read_spec(run, num_groups)
    if spec.num_groups is None:
        raise SpecError("the run has no num_groups: without end, LLMCollector collects in Python")
    open_root(spec, root)  # says what is wrong before anything slow begins
    console = Console()
    if open_run(root).holds(spec.num_groups):
        console.print(
            "The run is complete: nothing to collect. Another --root, or a larger --num-groups, makes more.\n"
        )
    else:
        _run_flow(spec, root)
    total = _print_run(console, open_run(root), root, conversations=2)
    if total.trajectories and total.failed == total.trajectories:
        raise RunFailedError(f"every trajectory failed; {_own_command()} show {root} --failures shows why")


@app.command
def show(root: str, *, conversations: int = 2, failures: bool = False) -> None:
    """Print what a run has come to, and some of its conversations.

    Parameters
    ----------
    root:
        Folder of the run.
    conversations:
        How many conversations to print.
    failures:
        Print the tracebacks of failed trajectories as well.
    """
    from llmcollect.store.reader import open_run

    console = Console()
    stored = open_run(root)
    _print_run(console, stored, root, conversations)
    if failures:
        for trajectory in stored.trajectories(include_failed=True):
            if trajectory.failure:
                console.rule(f"trajectory {trajectory.trajectory} · {trajectory.env}", align="left")
                console.print(trajectory.failure["traceback"], markup=False, highlight=False)


@app.command
def verify(root: str) -> None:
    """Read a whole run and check what must hold of it; exit code 1 if something does not.

    Parameters
    ----------
    root:
        Folder or s3:// URL of the run.
    """
    from llmcollect.store import verify as verify_run

    report = verify_run(root)
    for fault in report.faults:
        print(fault)
    planned = "no fixed number" if report.planned is None else f"{report.planned:,}"
    state = "complete" if report.complete else "whole so far" if report.ok else "damaged"
    print(
        f"run {report.run} in {root} is {state}: {report.trajectories:,} of {planned} trajectories "
        f"({report.failed:,} failed), {report.rows:,} steps and {report.tokens:,} tokens in {report.commits:,} commits"
    )
    if not report.ok:
        raise CorruptFileError(f"{len(report.faults)} faults in {root}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    Raises:
        SystemExit: Always, with the exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    verbose = "--verbose" in arguments
    try:
        app(arguments, exit_on_error=False, print_error=False)
        code = 0
    except CycloptsError as error:
        code = _complain(" ".join(str(error).split()), 2)
    except LLMCollectError as error:
        code = _complain(str(error), error.exit_code, verbose)
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = _complain("interrupted; what had finished is kept: run the same command again to go on", 130)
    except Exception as error:  # noqa: BLE001 - the last line of defence
        hint = "" if verbose else " (--verbose shows the traceback)"
        code = _complain(f"{type(error).__name__}: {' '.join(str(error).split())}{hint}", 1, verbose)
    sys.exit(code)


def _complain(message: str, code: int, verbose: bool = False) -> int:
    if verbose:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


def _set_verbosity(verbose: bool) -> None:
    if verbose:
        os.environ["LLMCOLLECT_VERBOSE"] = "1"
    else:
        for part in ("LOGGING", "SERVER_LOGGING", "INTERNAL_LOGGING"):
            os.environ.setdefault(f"PREFECT_{part}_LEVEL", "CRITICAL")
        os.environ.setdefault("PREFECT_LOGGING_ROOT_LEVEL", "CRITICAL")


def _read_spec(file: Path | None, num_groups: int | None) -> RunSpec:
    if file is None:
        from llmcollect.demo import DEMO_RUN

        data = DEMO_RUN.model_dump(mode="json")
    else:
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise SpecError(f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise SpecError(f"{file} is not JSON: {error}") from error
    if num_groups is not None:
        data = {**data, "num_groups": num_groups}
    return RunSpec.parse(data)


def _run_flow(spec: RunSpec, root: str) -> None:
    from llmcollect.display import shard_lines
    from llmcollect.orphans import own_children

    own_children()
    with shard_lines(Console(stderr=True)):
        from llmcollect.flows.collect import collect as flow

        asyncio.run(flow(spec, root))


def _print_run(console: Console, stored: "Run", root: str, conversations: int) -> "EnvSummary":
    from llmcollect.display import print_conversations, print_summary
    from llmcollect.summary import summarise

    summaries = summarise(stored)
    print_summary(console, summaries, f"run {stored.record.run} in {root}")
    print_conversations(console, stored, conversations)
    console.print(f"\nRead it again:  {_own_command()} show {root}", highlight=False, soft_wrap=True)
    return summaries[-1]


def _own_command() -> str:
    """How to call this program again from here: by name if it is on the path, else by its place."""
    program = Path(sys.argv[0])
    if program.name != "llmcollect":
        return "python -m llmcollect.cli"
    found = shutil.which("llmcollect")
    return "llmcollect" if found and Path(found).samefile(program) else os.path.relpath(program)


if __name__ == "__main__":
    main()
