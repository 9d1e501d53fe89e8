"""The Arrow schema of a step row: one row a step, every column documented, nothing inferred from data.

Storage is linear in the length of a conversation: `prompt_ids` holds only what the policy had not seen before. The
context of step k is the concatenation of `prompt_ids` and `response_ids` of the steps before it, from step 0 or the
last row whose `context_reset` is true, and then its own `prompt_ids`.
"""

import pyarrow as pa

FORMAT_VERSION = 1
"""Of the layout and the schema together; stored in `run.json`. Readers refuse a newer one."""


def _column(name: str, kind: pa.DataType, doc: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"doc": doc})


_TIME = pa.timestamp("us", tz="UTC")
_TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_LOGPROBS = pa.list_(pa.field("element", pa.float32(), nullable=True))
_VERSIONS = pa.list_(
    pa.field(
        "element",
        pa.struct([pa.field("version", pa.int64(), nullable=False), pa.field("count", pa.int32(), nullable=False)]),
        nullable=False,
    )
)

STEP_SCHEMA = pa.schema(
    [
        _column("run", pa.string(), "id of the run, as in run.json"),
        _column("shard", pa.int32(), "the shard that holds the trajectory: group % num_shards"),
        _column("trajectory", pa.int64(), "number of the trajectory in the run: group * group_size + sample"),
        _column("group", pa.int64(), "number of the group in the run"),
        _column("sample", pa.int32(), "number of the trajectory within its group"),
        _column("step", pa.int32(), "number of the step in the trajectory; -1: it failed before its first step"),
        _column("writer", pa.string(), "token of the process that collected and committed the row"),
        _column("attempt", pa.int32(), "which try of that writer at the trajectory, counting from 0"),
        _column("env", pa.string(), "name of the env in the spec"),
        _column("task_index", pa.int64(), "the group's number within its env"),
        _column("policy", pa.string(), "name of the policy in the spec"),
        _column("seed", pa.int64(), "sampling seed of the step, in [0, 2**32)"),
        _column("task", pa.string(), "JSON of the task, on step 0 (and -1): index, seed, the env's info, tools", True),
        _column("prompt_ids", _TOKENS, "token ids that the policy had not seen before; null on step -1", True),
        _column("context_reset", pa.bool_(), "the context starts anew with this row's prompt_ids"),
        _column("response_ids", _TOKENS, "sampled token ids, exactly as sampled; null if nothing was generated", True),
        _column("response_logprobs", _LOGPROBS, "log-prob of each sampled id under the sampling distribution", True),
        _column("policy_versions", _VERSIONS, "run-length: which policy version sampled how many tokens", True),
        _column("messages", pa.string(), "JSON list of the messages that prompt_ids render", True),
        _column("response_text", pa.string(), "the response decoded, special tokens left out", True),
        _column("response_message", pa.string(), "JSON of the message parsed, if it is more than its text", True),
        _column("observation", pa.string(), "JSON list of the messages that the env answered", True),
        _column("reward", pa.float64(), "reward of the step; null: none was given; NaN is kept", True),
        _column("terminated", pa.bool_(), "the task ended with this step"),
        _column("truncated", pa.bool_(), "the trajectory was cut short with this step"),
        _column("finish_reason", pa.string(), "why the response, or at the end the trajectory, stopped", True),
        _column("stop_reason", pa.string(), "the stop string or stop token id that ended the response", True),
        _column("failure", pa.string(), "JSON with type, message and traceback if the trajectory failed here", True),
        _column("info", pa.string(), "JSON of what the env put into info", True),
        _column("started_at", _TIME, "when the step's prompt was ready"),
        _column("generated_at", _TIME, "when its response was complete", True),
        _column("finished_at", _TIME, "when the env had answered"),
    ]
)

COLUMN_DOCS: dict[str, str] = {field.name: field.metadata[b"doc"].decode() for field in STEP_SCHEMA}
STEP_SCHEMA = pa.schema([field.remove_metadata() for field in STEP_SCHEMA])
