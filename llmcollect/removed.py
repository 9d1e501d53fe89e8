"""Arguments that collectors have elsewhere, and what does the same here."""

import difflib
import inspect
from collections.abc import Mapping

_INSTEAD = {
    "async_envs": "envs are collected asynchronously always",
    "collector_class": 'backend="local", "ray" or "prefect" says where shards run',
    "create_env_fn": "env takes a constructor or a list of them",
    "create_env_kwargs": "env=functools.partial(Env, **kwargs)",
    "device": "policies place themselves, and batch.to(device) moves what they yield",
    "dialog_turns_per_batch": "steps_per_batch",
    "env_device": "policies place themselves, and batch.to(device) moves what they yield",
    "exploration_type": "sampling=Sampling(temperature=...)",
    "flatten_data": "a batch is flat, one row a step",
    "frames_per_batch": "steps_per_batch",
    "init_random_frames": "sampling=Sampling(temperature=...)",
    "interruptor": "no env waits for another",
    "max_frames_per_traj": "limits=Limits(max_turns=...)",
    "num_workers": "num_shards, and limits=Limits(concurrency=...)",
    "num_threads": "limits=Limits(concurrency=...)",
    "policy_device": "policies place themselves, and batch.to(device) moves what they yield",
    "policy_factory": "policy takes a constructor or a list of them",
    "preemptive_threshold": "no env waits for another",
    "queue": "collector.start(queue=...)",
    "replay_buffer": "collector.start(replay_buffer=...)",
    "reset_at_each_iter": "a trajectory begins with a reset, and runs to its end",
    "return_same_td": "each batch is a new one",
    "split_trajs": 'yields="trajectories"',
    "storing_device": "policies place themselves, and batch.to(device) moves what they yield",
    "total_dialog_turns": "total_steps",
    "total_frames": "total_steps",
    "track_policy_version": 'rows have ("tokens", "policy_version") always',
    "update_at_each_batch": "collector.update_weights(folder)",
    "weight_sync_schemes": "collector.update_weights(folder)",
    "weight_updater": "collector.update_weights(folder)",
    "yield_completed_trajectories": 'yields="trajectories"',
    "yield_only_last_steps": 'yields="last_steps"',
}


def refuse(arguments: Mapping[str, object]) -> None:
    """Refuse arguments that LLMCollector does not have.

    Raises:
        TypeError: There is one; says what does the same here, or which name may have been meant.
    """
    for name in arguments:
        if name in _INSTEAD:
            raise TypeError(f"LLMCollector has no argument {name!r}: {_INSTEAD[name]}")
        from llmcollect.collector import LLMCollector

        close = difflib.get_close_matches(name, inspect.signature(LLMCollector).parameters, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"LLMCollector has no argument {name!r}{hint}")
