"""The vocabulary: what envs, policies and the rollout hand to each other.

    Env.reset(task) -> Observation          what the policy is told first
    Policy.generate(ids, ...) -> Generation token ids in, token ids out
    Completion                              what the env gets: the response as text, message and ids
    Env.step(completion) -> Transition      what the env answers

All of them are frozen; none of them knows about shards, files or flows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""An OpenAI-style chat message: `{"role": "user", "content": "..."}`, tool calls and tool results included."""


@dataclass(frozen=True, slots=True)
class Task:
    """What `Env.reset` is asked for. The members of a group get the same task.

    Attributes:
        index: The group's number within its env, counting from 0: an env over a dataset takes item `index % len`.
        seed: An integer in [0, 2**32) for everything random in the task.
    """

    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy is told: messages to append to the conversation.

    Attributes:
        messages: New messages, in order; never those that the conversation holds already. At least one.
        tools: OpenAI-style tool specs; those of the first observation hold for the whole trajectory.
        info: Anything. That of the first observation describes the task and is stored with it, so that a
            reward can be recomputed later.
        new_context: The messages are all that the policy is to see from here on: what came before is left out of the
            context (a summary that replaces a long history, say). The row says so with `context_reset`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    new_context: bool = False

    @classmethod
    def user(cls, text: str, **info: Any) -> "Observation":
        """One user message."""
        return cls(messages=({"role": "user", "content": text},), info=info)


@dataclass(frozen=True, slots=True)
class Generation:
    """What a policy sampled.

    Attributes:
        token_ids: The sampled ids, the end-of-turn token included where it was sampled. May be empty.
        logprobs: One float a sampled id, of the distribution that was sampled from; None if the policy has none.
        policy_versions: Run-length pairs (version, number of tokens) in order; the counts sum to `len(token_ids)`.
        finish_reason: "stop", "length" or another word of the engine's.
        stop_reason: What stopped it, where the engine says so (a stop string, or a stop token's id as text).
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    policy_versions: Sequence[tuple[int, int]]
    finish_reason: str
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One response of the policy as its env sees it.

    Attributes:
        text: The response decoded, special tokens left out.
        message: The assistant message parsed from it: content, and reasoning and tool calls where the model has them.
        token_ids: The sampled ids.
        finish_reason: "stop", "length" or another word of the engine's.
    """

    text: str
    message: Message
    token_ids: Sequence[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Transition:
    """What an env answers to a completion.

    Attributes:
        reward: The step's reward; None where there is none, which is not 0.
        observation: What comes next; its messages are stored even when the trajectory ends here.
        terminated: The task has ended.
        truncated: The env cuts the trajectory short.
        info: Anything; stored with the step.
    """

    reward: float | None = None
    observation: Observation | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One row of the store before it is Arrow: see `llmcollect.schema` for the columns of the same names."""

    step: int
    prompt_ids: Sequence[int] | None = None
    context_reset: bool = False
    response_ids: Sequence[int] | None = None
    response_logprobs: Sequence[float] | None = None
    policy_versions: Sequence[tuple[int, int]] | None = None
    messages: str | None = None
    response_text: str | None = None
    response_message: str | None = None
    observation: str | None = None
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    finish_reason: str | None = None
    stop_reason: str | None = None
    failure: str | None = None
    info: str | None = None
    seed: int = 0
    started_at: int = 0
    generated_at: int | None = None
    finished_at: int = 0


@dataclass(slots=True)
class Trajectory:
    """A finished trajectory on its way to a commit: the steps of the attempt that counts, and who made them.

    Attributes:
        steps: At least one; a trajectory that failed before its first step has one with `step == -1`.
        failed_attempts: One dict (attempt, type, message) for each earlier attempt that failed.
    """

    trajectory: int
    group: int
    sample: int
    env: str
    task_index: int
    policy: str
    attempt: int
    task: str
    steps: list[Step]
    failed_attempts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it ended in a failure rather than in an outcome."""
        return self.steps[-1].failure is not None

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(step.response_ids or ()) for step in self.steps)

    @property
    def reward(self) -> float | None:
        """The sum of the steps' rewards; None where no step has one."""
        rewards = [step.reward for step in self.steps if step.reward is not None]
        return sum(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What became of a group.

    Attributes:
        expected: Members in the plan: the run's `group_size`.
        arrived: Members that came to an outcome.
        failed: Members that failed for good.
    """

    group: int
    expected: int
    arrived: int
    failed: int

    @property
    def complete(self) -> bool:
        """Whether every member came to an outcome."""
        return self.arrived == self.expected
