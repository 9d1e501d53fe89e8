"""Envs of TorchRL: history and text, one task a group, new messages only."""

import json
import sys
import warnings
from functools import partial
from typing import Any

import pytest

from llmcollect import EnvSpec, Limits, LLMCollector, StepBatch
from llmcollect.envs import TorchRLEnv
from llmcollect.errors import EnvError, SpecError
from llmcollect.types import Completion, Task
from tests import tiny_model
from tests.fakes import BytePolicy

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from tensordict import TensorDict, lazy_stack  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402
from torchrl.data import Composite, NonTensor, Unbounded  # noqa: E402
from torchrl.data.llm import History  # noqa: E402
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv  # noqa: E402
from torchrl.envs.llm import ChatEnv, GSM8KRewardParser, LLMEnv  # noqa: E402
from torchrl.envs.llm.chat import DatasetChatEnv  # noqa: E402
from torchrl.modules.llm.policies import ChatHistory  # noqa: E402

ROWS = [{"query": f"What is {i} + 1?", "answer": f"so it is #### {i + 1}"} for i in range(5)]


def query(task: Task) -> dict[str, Any]:
    return {"query": f"question {task.index}"}


class Judge(Transform):
    """Asks again after each response, and rewards its length; from the second turn on it may do otherwise."""

    def __init__(self, then: str = "go on") -> None:
        super().__init__()
        self._then = then

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        if self.parent.base_env.input_mode == "text":
            full = tensordict["text", "full"][0]
            more = f"\n<|im_start|>user\n{self._then}<|im_end|>\n<|im_start|>assistant\n"
            next_tensordict["text", "prompt"] = [full + more]
            size = len(full)
        else:
            history = next_tensordict["history"].prompt
            said = History.from_chats([[{"role": "user", "content": self._then}]])
            size = len(history[0, -1].content)
            prompt = said if self._then == "in short" else history.extend(said, inplace=False, dim=-1)
            next_tensordict["history"] = ChatHistory(prompt=prompt, batch_size=(1,))
        next_tensordict["reward"] = torch.full((1, 1, 1), float(size))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded((1, 1, 1))
        return reward_spec


def chat(turns: int = 3, then: str = "go on", mode: str = "history") -> Any:
    tokenizer = tiny_model.make_tokenizer() if mode == "text" else None
    env = ChatEnv(system_prompt="Be brief.", input_mode=mode, tokenizer=tokenizer)
    return TransformedEnv(env).append_transform(StepCounter(max_steps=turns)).append_transform(Judge(then))


def rows_env(**options: Any) -> Any:
    def collate(rows: list[dict[str, str]]) -> dict[str, list[str]]:
        return {key: [row[key] for row in rows] for key in rows[0]}

    loader = DataLoader(ROWS, batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(1,), system_prompt="Add.", **options)
    return env.append_transform(StepCounter(max_steps=1)).append_transform(GSM8KRewardParser(tokenizer=None))


def say(text: str, reason: str = "stop") -> Completion:
    return Completion(text, {"role": "assistant", "content": text}, [1, 2], reason)


def collect(env: Any, **options: Any) -> dict[int, list[dict[str, Any]]]:
    collector = LLMCollector(
        env=env, policy=BytePolicy, num_groups=4, group_size=3, yields="trajectories", steps_per_batch=8, **options
    )
    rows = [row for batch in collector for row in StepBatch.from_tensordict(batch).to_arrow().to_pylist()]
    found: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["trajectory"], row["step"])):
        assert row["failure"] is None
        found.setdefault(row["trajectory"], []).append(row)
    return found


def test_a_chat_of_turns_hands_over_new_messages_only() -> None:
    found = collect(partial(TorchRLEnv, chat, reset_data=query))
    assert len(found) == 12
    for steps in found.values():
        index = steps[0]["group"]
        assert json.loads(steps[0]["messages"]) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"question {index}"},
        ]
        assert [json.loads(step["messages"]) for step in steps[1:]] == [[{"role": "user", "content": "go on"}]] * 2
        assert [step["reward"] for step in steps] == [7.0, 7.0, 7.0]
        assert [step["truncated"] for step in steps] == [False, False, True], "by StepCounter"
        assert not any(step["context_reset"] or step["terminated"] for step in steps)


def test_a_text_is_parsed_where_its_template_is_named() -> None:
    env = TorchRLEnv(chat, mode="text", reset_data=query, text_template="chatml_format")
    first = env.reset(Task(4, 0))
    assert [message["role"] for message in first.messages] == ["system", "user"]
    second = env.step(say("hey"))
    assert second.observation is not None
    assert second.observation.messages == [{"role": "user", "content": "go on"}]
    assert not second.observation.new_context
    assert second.reward == len(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nquestion 4<|im_end|>\n"
    ) + len("<|im_start|>assistant\nhey<|im_end|>")


def test_a_text_alone_is_a_user_message() -> None:
    env = TorchRLEnv(chat, mode="text", reset_data=query)
    assert env.reset(Task(4, 0)).messages[0]["content"].endswith("question 4<|im_end|>\n<|im_start|>assistant\n")
    then = env.step(say("hey", "length")).observation
    assert then is not None
    assert then.messages[0]["content"] == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    found = collect(partial(TorchRLEnv, chat, mode="text", reset_data=query))
    assert {len(steps) for steps in found.values()} == {3}


def test_a_prompt_that_replaces_the_conversation_begins_a_new_context() -> None:
    for steps in collect(partial(TorchRLEnv, chat, then="in short", reset_data=query)).values():
        assert [step["context_reset"] for step in steps] == [False, True, True]
        assert json.loads(steps[1]["messages"]) == [{"role": "user", "content": "in short"}]


def test_a_silent_env_ends_the_trajectory() -> None:
    for steps in collect(partial(TorchRLEnv, "torchrl.envs.llm:ChatEnv", reset_data=query)).values():
        (step,) = steps
        assert (step["reward"], step["terminated"], step["truncated"]) == (None, False, True)
        assert json.loads(step["info"]) == {"ended": "the env said nothing new"}


def test_members_of_a_group_get_the_row_of_their_task() -> None:
    found = collect(partial(TorchRLEnv, rows_env), limits=Limits(concurrency=5))
    for steps in found.values():
        row = ROWS[steps[0]["group"]]
        assert json.loads(steps[0]["messages"])[-1]["content"] == row["query"]
        assert json.loads(steps[0]["task"])["info"]["answer"] == row["answer"]
        assert steps[0]["reward"] is not None
    env = TorchRLEnv(rows_env)
    assert env.reset(Task(7, 0)).messages[-1]["content"] == ROWS[2]["query"], "an epoch later"
    right = env.step(say("<think>easy</think> <answer>3</answer>"))
    wrong = TorchRLEnv(rows_env)
    wrong.reset(Task(7, 0))
    missed = wrong.step(say("no idea"))
    assert right.terminated
    assert right.reward is not None
    assert missed.reward is not None
    assert right.reward > missed.reward
    assert right.info["success"] is True


def llm_env(batch_size: Any = ()) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LLMEnv is deprecated, and misses the id of an end
        return LLMEnv(from_text=True, batch_size=batch_size)


class Dice(EnvBase):
    """Of batch size [] or [1]; asks for a number that only its seed knows, twice."""

    def __init__(self, batch_size: tuple[int, ...] = (), key: str = "text") -> None:
        super().__init__(batch_size=batch_size)
        self._key = key
        self.observation_spec = Composite({key: NonTensor(shape=batch_size, example_data="")}, shape=batch_size)
        self.action_spec = Composite({"said": NonTensor(shape=batch_size, example_data="")}, shape=batch_size)
        self.reward_spec = Composite({"reward": Unbounded((*batch_size, 1))}, shape=batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        self._turn = 0
        number = int(torch.randint(1000, (), generator=self._generator))
        return self._with_text(f"guess {number}")

    def _step(self, tensordict: Any) -> Any:
        self._turn += 1
        text = tensordict[self._key][0] if self.batch_size else tensordict[self._key]
        said = tensordict["said"][0] if self.batch_size else tensordict["said"]
        after = self._with_text(f"{text}{said}; again")
        after["reward"] = torch.full((*self.batch_size, 1), len(said), dtype=torch.float32)
        after["done"] = after["terminated"] = torch.full((*self.batch_size, 1), self._turn == 2)
        return after

    def _with_text(self, text: str) -> Any:
        one = TensorDict({self._key: text})
        return lazy_stack([one]) if self.batch_size else one


class Ids(Dice):
    """Rewards the sum of the sampled ids."""

    def __init__(self, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size)
        self.action_spec = Composite(
            said=NonTensor(shape=batch_size, example_data=""),
            tokens=Composite(response=Unbounded((*batch_size, -1), dtype=torch.int64), shape=batch_size),
            shape=batch_size,
        )

    def _step(self, tensordict: Any) -> Any:
        after = super()._step(tensordict)
        after["reward"] = tensordict["tokens", "response"].sum(-1, keepdim=True).float()
        return after


@pytest.mark.parametrize("batch_size", [(), (1,)])
def test_a_seed_is_a_task_with_or_without_a_batch(batch_size: tuple[int, ...]) -> None:
    for steps in collect(partial(TorchRLEnv, Dice, batch_size=batch_size)).values():
        assert [json.loads(step["messages"])[0]["content"] for step in steps[1:]] == ["; again"]
        assert [step["terminated"] for step in steps] == [False, True]
        assert [step["reward"] for step in steps] == [7.0, 7.0]
    groups: dict[int, set[str]] = {}
    for steps in collect(partial(TorchRLEnv, Dice, batch_size=batch_size)).values():
        groups.setdefault(steps[0]["group"], set()).add(steps[0]["messages"])
    assert {len(tasks) for tasks in groups.values()} == {1}
    assert len(set().union(*groups.values())) == 4


def test_tokens_are_kept_beside_the_history() -> None:
    tokenizer = tiny_model.make_tokenizer()
    env = TorchRLEnv(ChatEnv, tokenizer=tokenizer, with_tokenizer=True, reset_data=query)
    assert env.reset(Task(2, 0)).messages == [{"role": "user", "content": "question 2"}]
    assert env.step(say("hey")).truncated


@pytest.mark.parametrize("batch_size", [(), (1,)])
def test_an_env_that_asks_for_ids_gets_those_that_were_sampled(batch_size: tuple[int, ...]) -> None:
    env = TorchRLEnv(Ids, batch_size=batch_size)
    env.reset(Task(0, 0))
    assert env.step(say("hey")).reward == 3.0


@pytest.mark.parametrize("batch_size", [(), (1,)])
def test_an_llm_env_is_a_text(batch_size: tuple[int, ...]) -> None:
    env = TorchRLEnv(llm_env, batch_size=batch_size, reset_data=lambda task: {"text": "Once"})
    assert env.reset(Task(0, 0)).messages == [{"role": "user", "content": "Once"}]
    assert env.step(say(" upon")).truncated, "it says nothing of its own"


@pytest.mark.parametrize(
    ("env", "options", "error", "words"),
    [
        (
            Dice,
            {"key": "board"},
            EnvError,
            r"Dice has neither \('history', 'prompt'\).*; it has board, done, terminated$",
        ),
        (dict, {}, EnvError, "dict made a dict, which is no EnvBase"),
        (Dice, {"batch_size": (2,)}, EnvError, r"batch size \[2\]; TorchRLEnv takes \[\] or \[1\]"),
        (rows_env, {"reset_data": query}, SpecError, "leave reset_data out"),
        ("tests.fakes:Nope", {}, SpecError, "cannot import"),
        ("tests.fakes:END", {}, SpecError, "must be callable"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_line(
    env: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        TorchRLEnv(env, **options).reset(Task(0, 0))
    assert "\n" not in str(raised.value)


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        while True:
            yield {"query": "again?"}


def test_rows_that_cannot_be_picked_are_refused() -> None:
    loader = DataLoader(Endless(), batch_size=1)
    with pytest.raises(EnvError, match="an order of its own"):
        TorchRLEnv(DatasetChatEnv.from_dataloader, dataloader=loader, batch_size=(1,))


def test_a_template_that_torchrl_does_not_parse_is_refused() -> None:
    env = TorchRLEnv(chat, mode="text", reset_data=query, text_template="morse")
    with pytest.raises(SpecError, match="text_template 'morse'"):
        env.reset(Task(0, 0))


def test_without_torchrl_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl.envs", None)
    with pytest.raises(SpecError, match=r"pip install 'llmcollect\[torchrl\]'"):
        TorchRLEnv(chat)


def test_a_process_of_its_own_holds_one_too() -> None:
    spec = EnvSpec(
        target="llmcollect.envs:TorchRLEnv",
        kwargs={"constructor": "tests.envs.test_torchrl:Dice"},
        isolate="process",
    )
    assert len(collect(spec, limits=Limits(concurrency=2))) == 12
