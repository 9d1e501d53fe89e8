"""What a person sees in a terminal: one line a shard while a run goes on, a table and conversations at its end."""

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from llmcollect.progress import ShardProgress, watching
from llmcollect.store import Run, StoredTrajectory
from llmcollect.summary import HEADERS, EnvSummary, cells

_ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}


@contextlib.contextmanager
def shard_lines(console: Console) -> Iterator[None]:
    """Within the block, each shard that starts has a line with trajectories, tokens/s and mean reward."""
    shards: dict[TaskID, ShardProgress] = {}

    class Lines(Progress):
        def get_renderables(self) -> Iterator[Any]:
            for line, shard in shards.items():
                self.update(
                    line,
                    total=shard.planned,
                    completed=shard.stored + shard.done,
                    description=f"shard {shard.shard}",
                    state=_state(shard),
                )
            yield from super().get_renderables()

    lines = Lines(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    )
    waiting = lines.add_task("Prefect", total=None, state="starting")

    def show(shard: ShardProgress) -> None:
        lines.update(waiting, visible=False)
        shards[lines.add_task(f"shard {shard.shard}", total=None, state="")] = shard

    with watching(show), lines:
        yield


def print_summary(console: Console, summaries: list[EnvSummary], title: str) -> None:
    """A table with one line an env."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(HEADERS[0], overflow="fold")  # when space is short it is the name of the env that is folded
    for header in HEADERS[1:]:
        table.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(*map(escape, cells(summary)), style="bold" if summary.env == "all" else "")
    console.print(table)


def print_conversations(console: Console, run: Run, count: int) -> None:
    """The first conversation of each env, until there are `count`; those with a reward first."""
    for trajectory in islice(_samples(run), count):
        reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
        console.print()
        console.rule(
            f"trajectory {trajectory.trajectory} · {escape(trajectory.env)} · {reward}", align="left", style="dim"
        )
        for message in trajectory.messages:
            role = str(message.get("role"))
            text = Text(f"{role}: ", style=f"bold {_ROLE_STYLES.get(role, '')}")
            text.append(_readable(message), style=_ROLE_STYLES.get(role, ""))
            console.print(text)
        if trajectory.failure:
            console.print(Text(f"failed: {trajectory.failure['message']}", style="red"))


def _state(shard: ShardProgress) -> str:
    if shard.started_at is None:
        return "complete" if shard.ended_at else "engine starting"
    reward = "-" if shard.mean_reward is None else f"{shard.mean_reward:.2f}"
    failed = f" · {shard.failed} failed" if shard.failed else ""
    return f"{shard.tokens_per_s:,.0f} tokens/s · mean reward {reward}{failed}"


def _samples(run: Run) -> Iterator[StoredTrajectory]:
    """One trajectory an env, a rewarded one if the run has one, then the others in order."""
    best: dict[str, StoredTrajectory] = {}
    rest: list[StoredTrajectory] = []
    for trajectory in run.trajectories(include_failed=True):
        held = best.get(trajectory.env)
        if held is None or ((trajectory.reward or 0) > 0 and (held.reward or 0) <= 0):
            best[trajectory.env] = trajectory
        elif len(rest) < 100:
            rest.append(trajectory)
        if len(best) == len(run.spec.envs) and all((held.reward or 0) > 0 for held in best.values()):
            break
    yield from best.values()
    yield from rest


def _readable(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    calls = [f"[calls {call['function']['name']}({call['function']['arguments']})]" for call in _calls(message)]
    return " ".join([text.strip(), *calls]).strip() or "[nothing]"


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for call in message.get("tool_calls") or [] if "function" in call]
