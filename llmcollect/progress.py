"""What a shard has done so far: plain counters that anyone may read while it runs."""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llmcollect.types import Trajectory


@dataclass(slots=True)
class ShardProgress:
    """Counters of one shard. Written on the engines' loop alone; readers see a moment of it.

    Attributes:
        planned: Trajectories of the shard; None for an unbounded run.
        stored: Those that others had collected: earlier runs, or another writer before their turn came.
        done: Finished now, failed ones included.
        rewarded: Those of them that have a reward.
        hung_envs: Env instances given up during a call.
        late_results: Results that came after their attempt was given up; they are dropped.
        duplicates: Trajectories that another writer had committed first.
    """

    shard: int
    planned: int | None = None
    stored: int = 0
    done: int = 0
    failed: int = 0
    truncated: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0
    steps: int = 0
    tokens: int = 0
    commits: int = 0
    hung_envs: int = 0
    late_results: int = 0
    duplicates: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    _clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def start(self) -> None:
        """The first trajectory begins: the engine is up."""
        self.started_at = self._clock()

    def end(self) -> None:
        """The shard is through."""
        self.ended_at = self._clock()

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished trajectory."""
        self.done += 1
        self.steps += sum(step.step >= 0 for step in trajectory.steps)
        self.tokens += trajectory.num_tokens
        self.failed += trajectory.failed
        self.truncated += trajectory.steps[-1].truncated
        reward = trajectory.reward
        if reward is not None and not trajectory.failed:
            self.rewarded += 1
            self.reward_sum += reward

    @property
    def mean_reward(self) -> float | None:
        """Mean over trajectories with a reward; None if there is none."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second since the engine is up."""
        if self.started_at is None:
            return 0.0
        seconds = (self.ended_at or self._clock()) - self.started_at
        return self.tokens / seconds if seconds > 0 else 0.0


_watcher: contextvars.ContextVar[Callable[[ShardProgress], None] | None] = contextvars.ContextVar(
    "llmcollect_watcher", default=None
)


@contextlib.contextmanager
def watching(call: Callable[[ShardProgress], None]) -> Iterator[None]:
    """Within the block, each shard that starts in this context is shown to `call` once, to be read as it goes on.

    A flow's parameters are data, so a display cannot be one of them.
    """
    token = _watcher.set(call)
    try:
        yield
    finally:
        _watcher.reset(token)


def announced(progress: ShardProgress) -> ShardProgress:
    """Show a shard's counters to whoever is watching."""
    if (call := _watcher.get()) is not None:
        call(progress)
    return progress
