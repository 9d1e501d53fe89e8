"""One trajectory as a coroutine that reads like the definition of an episode.

    reset -> [ prompt -> generate -> step -> record ] until done

Hundreds run at once on one loop; each sends its request the moment its env is ready, so the engine's continuous
batching does the batching and no env waits for another. A failure ends its own trajectory: `collect_trajectory` tries
again with a fresh env, and in the end records the last try with its traceback.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from llmcollect import canonical_json
from llmcollect.deadline import Deadline
from llmcollect.envs.pool import EnvHandle, EnvPool
from llmcollect.errors import EngineDeadError, EnvError, PolicyError, PromptTooLongError, SpecError
from llmcollect.policies.base import Policy
from llmcollect.policies.engines import Engine
from llmcollect.run import Limits, RunSpec, TrajectoryPlan
from llmcollect.types import Completion, Generation, Observation, Step, Task, Trajectory


@dataclass(slots=True)
class Attempt:
    """What one try at a trajectory has come to, kept outside the coroutine so that a failure loses none of it."""

    task: str
    steps: list[Step] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Note the failure on the step where it happened, or on a row of its own before the first."""
        text = "".join(traceback.format_exception(error))
        failure = {"type": type(error).__name__, "message": str(error), "traceback": text[-8000:]}
        if not self.steps:
            self.steps.append(Step(step=-1, started_at=_now()))
        last = self.steps[-1]
        last.failure = canonical_json.dumps(failure)
        last.finished_at = _now()


async def collect_trajectory(
    plan: TrajectoryPlan, spec: RunSpec, engine: Engine, policy_name: str, pool: EnvPool
) -> Trajectory:
    """Collect one trajectory, trying again with a fresh env up to `max_attempts`.

    Raises:
        SpecError: The env's target cannot be imported or does not take its kwargs.
        PolicyError: The engine died more often than `max_engine_restarts` allows.
    """
    failed_attempts: list[dict[str, object]] = []
    tries = 0  # without those that the engine's death ended: that is no fault of the trajectory
    for number in count():
        attempt = Attempt(_task_json(plan.task))
        await engine.ready()  # it may be one that replaces a dead one, and is still coming up
        policy = engine.policy
        try:
            await _rollout(plan, pool, policy, spec, attempt, f"{plan.trajectory}-{number}")
        except SpecError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever an env or engine raises is this trajectory's end
            attempt.fail(error)
            dead = isinstance(error, EngineDeadError)
            tries += not dead
            if dead or (tries < spec.limits.max_attempts and not isinstance(error, PromptTooLongError)):
                failed_attempts.append({"attempt": number, "type": type(error).__name__, "message": str(error)[:1000]})
                if dead:
                    await engine.replace(policy, spec.limits.max_engine_restarts)
                continue
        return Trajectory(
            trajectory=plan.trajectory,
            group=plan.group,
            sample=plan.sample,
            env=pool.name,
            task_index=plan.task.index,
            policy=policy_name,
            attempt=number,
            task=attempt.task,
            steps=attempt.steps,
            failed_attempts=failed_attempts,
        )
    raise AssertionError("unreachable")


async def _rollout(
    plan: TrajectoryPlan, pool: EnvPool, policy: Policy, spec: RunSpec, attempt: Attempt, request: str
) -> None:
    """The episode with an env of the pool, which has it back if all went well."""
    async with Deadline(spec.limits.trajectory_timeout_s) as deadline:
        deadline.phase(spec.limits.reset_timeout_s, EnvError, f"making env {pool.name}")
        env = await pool.borrow()
        try:
            await _converse(plan, env, policy, spec, attempt, request, deadline)
        except BaseException:
            pool.discard(env)
            raise
        pool.give_back(env)


async def _converse(
    plan: TrajectoryPlan,
    env: EnvHandle,
    policy: Policy,
    spec: RunSpec,
    attempt: Attempt,
    request: str,
    deadline: Deadline,
) -> None:
    """The episode itself; appends to `attempt.steps` as it goes."""
    limits, steps = spec.limits, attempt.steps
    deadline.phase(limits.reset_timeout_s, EnvError, "reset")
    observation = await env.reset(plan.task)
    attempt.task = _task_json(plan.task, observation)
    conversation = policy.conversation(observation.tools)
    messages = canonical_json.dumps(list(observation.messages))
    for number in count():
        step = Step(step=number, seed=plan.step_seed(number), started_at=_now())
        step.prompt_ids, step.context_reset = conversation.prompt(observation.messages, observation.new_context)
        step.messages = messages
        if steps and (exhausted := _exhausted(len(conversation.context_ids), policy, limits)):
            _truncate(steps[-1], exhausted)
            return
        steps.append(step)

        deadline.phase(limits.generate_timeout_s, PolicyError, "generate")
        generation = await policy.generate(conversation.context_ids, spec.sampling, step.seed, f"{request}-{number}")
        _record_generation(step, generation)
        step.response_text, message = conversation.respond(generation.token_ids)
        if len(message) > 2 or message.get("content") != step.response_text:
            step.response_message = canonical_json.dumps(message)

        deadline.phase(limits.step_timeout_s, EnvError, "step")
        transition = await env.step(
            Completion(step.response_text, message, generation.token_ids, generation.finish_reason)
        )
        step.reward, step.terminated, step.truncated = transition.reward, transition.terminated, transition.truncated
        step.info = canonical_json.dumps(dict(transition.info)) if transition.info else None
        if transition.observation is not None:
            step.observation = messages = canonical_json.dumps(list(transition.observation.messages))
        step.finished_at = _now()
        if step.terminated or step.truncated:
            return
        if limits.max_turns is not None and number + 1 >= limits.max_turns:
            _truncate(step, "max_turns")
            return
        assert transition.observation is not None
        observation = transition.observation


def _exhausted(context: int, policy: Policy, limits: Limits) -> str | None:
    """Why a next response cannot be sampled, if so."""
    if limits.max_trajectory_tokens is not None and context >= limits.max_trajectory_tokens:
        return "max_trajectory_tokens"
    return "context" if context >= policy.max_context else None


def _truncate(step: Step, why: str) -> None:
    step.truncated, step.finish_reason = True, why


def _record_generation(step: Step, generation: Generation) -> None:
    ids, logprobs = generation.token_ids, generation.logprobs
    counted = sum(times for _, times in generation.policy_versions)
    if counted != len(ids) or (logprobs is not None and len(logprobs) != len(ids)):
        given = "no" if logprobs is None else len(logprobs)
        raise PolicyError(
            f"the policy gave {len(ids)} token ids, {given} log-probs and version counts that sum to {counted}"
        )
    step.response_ids, step.response_logprobs = ids, logprobs
    step.policy_versions = _merged(generation.policy_versions)
    step.finish_reason, step.stop_reason = generation.finish_reason, generation.stop_reason
    step.generated_at = _now()


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same run-lengths with neighbours of one version joined and empty ones left out."""
    merged: list[tuple[int, int]] = []
    for version, times in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + times)
        elif times:
            merged.append((version, times))
    return merged


def _task_json(task: Task, observation: Observation | None = None) -> str:
    described: dict[str, Any] = {"index": task.index, "seed": task.seed}
    if observation is not None:
        described["info"] = dict(observation.info)
        if observation.tools:
            described["tools"] = list(observation.tools)
    return canonical_json.dumps(described)


def _now() -> int:
    return time.time_ns() // 1000
