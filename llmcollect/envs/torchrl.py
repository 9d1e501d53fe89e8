"""TorchRLEnv: an env of TorchRL with a chat history or a text.

task -> set_seed, reset -> TensorDict -> messages -> completion -> ("history" | "text", "full") -> step -> new messages
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from llmcollect.components import import_target
from llmcollect.errors import EnvError, SpecError
from llmcollect.types import Completion, Message, Observation, Task, Transition

# The whole conversation as an env holds it: messages, or one text.
Dialogue = list[Message] | str


class TorchRLEnv:
    """Any `EnvBase` of TorchRL whose observation is a chat history (`("history", "prompt")`) or a text.

    That is `ChatEnv` with `input_mode` "history" or "text", with whatever transforms, `GSM8KEnv` and other
    `DatasetChatEnv`s, and `LLMEnv`; of batch size [] or [1]. The response is put back as TorchRL's own wrappers do it:
    prompt, response and full history or text.

    - The members of a group get the same task: `set_seed(task.seed)` comes before each reset, and an env with a
      `DataLoadingPrimer` is given row `task.index % len` of the loader's dataset, whatever order the loader has. An env
      whose `_set_seed` seeds torch's global generator shares that with the others of its process; give it
      `EnvSpec(..., isolate="process")`.
    - Messages that the env's next prompt has beyond the conversation are the next observation. A prompt that does not
      begin with the conversation so far replaces it (`context_reset`).
    - The reward is the sum of `("next", reward)`, and None where there is no such entry. "done" without "truncated"
      counts as terminated. An env that says nothing new though it is not done, as a bare `ChatEnv` does, ends the
      trajectory as truncated, with `info["ended"]`.
    - Texts, numbers and tensors of one element at the top of the TensorDict go to `info`.

    Args:
        constructor: The env's class or a function that makes one, or its import path; called once an instance.
        reset_data: Entries of the TensorDict that the env is reset with, such as the "query" of a `ChatEnv`: a function
            `task -> {"query": ...}` or its import path. A tensor is expanded to the env's batch size; other values are
            held as they are.
        reward: Key of the reward.
        text_template: For texts that are rendered conversations: the template that turns them into messages, one that
            `torchrl.data.llm.History.from_text` knows ("chatml_format", "qwen", ...). Without it the text is one user
            message, and what is added to it later another one.
        **kwargs: Those of the constructor.

    Raises:
        SpecError: TorchRL is not installed, or an import path leads nowhere.
        EnvError: What was made is no env of TorchRL, or one of another batch size, or its rows cannot be picked.
    """

    def __init__(
        self,
        constructor: str | Callable[..., Any],
        *,
        reset_data: str | Callable[[Task], Mapping[str, Any]] | None = None,
        reward: str = "reward",
        text_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            from torchrl.envs import EnvBase
        except ImportError as error:
            raise SpecError(f"TorchRLEnv needs torchrl: pip install 'llmcollect[torchrl]' ({error})") from error
        make = import_target(constructor) if isinstance(constructor, str) else constructor
        self._name = str(getattr(make, "__name__", None) or constructor)
        self._reset_data = import_target(reset_data) if isinstance(reset_data, str) else reset_data
        for function, what in ((make, "constructor"), (self._reset_data, "reset_data")):
            if function is not None and not callable(function):
                raise SpecError(f"the {what} of TorchRLEnv must be callable or an import path; got {function!r:.200}")
        self._env: Any = make(**kwargs)
        if not isinstance(self._env, EnvBase):
            raise EnvError(f"{self._name} made a {type(self._env).__name__}, which is no EnvBase of TorchRL")
        if tuple(self._env.batch_size) not in ((), (1,)):
            raise EnvError(f"{self._name} has batch size {list(self._env.batch_size)}; TorchRLEnv takes [] or [1]")
        self._reward, self._template = reward, text_template
        self._rows = _pick_rows(self._env, self._name)
        if self._rows is not None and reset_data is not None:
            raise SpecError(f"{self._name} is reset with the rows of its data loader: leave reset_data out")
        self._state: Any = None
        self._dialogue: Any = None
        self._task_info: dict[str, Any] = {}

    def reset(self, task: Task) -> Observation:
        """The conversation that the env begins with.

        Raises:
            EnvError: The env observes neither a history nor a text, or not a first message.
        """
        self._env.set_seed(task.seed)
        if self._rows is not None:
            self._rows(task.index)
        entries = None if self._reset_data is None else self._tensordict(self._reset_data(task))
        self._state = self._env.reset(entries)
        self._dialogue = self._find_dialogue(self._state)
        messages = _messages(self._dialogue.read(self._one(self._state)))
        if not messages:
            raise EnvError(f"{self._name} was reset to an empty conversation")
        self._task_info = _scalars(self._one(self._state))
        return Observation(messages=messages, info=self._task_info)

    def step(self, completion: Completion) -> Transition:
        """Put the response into the TensorDict, and step."""
        known = self._dialogue.answer(self._state, completion)
        self._state = self._env.step(self._state)
        after = self._state["next"]
        one = self._one(after)
        now = self._dialogue.read(one)
        extends = now[: len(known)] == known
        new = _messages(now[len(known) :] if extends else now)
        truncated = _any(after, "truncated")
        terminated = _any(after, "terminated") or (_any(after, "done") and not truncated)
        info = {key: value for key, value in _scalars(one).items() if self._task_info.get(key) != value}
        if not (new or terminated or truncated):
            truncated, info = True, {**info, "ended": "the env said nothing new"}
        reward = after.get(self._reward, None)
        self._state = self._env.step_mdp(self._state)
        return Transition(
            reward=None if reward is None else float(reward.float().sum()),
            observation=Observation(new, new_context=not extends) if new else None,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )

    def close(self) -> None:
        """Close the env."""
        if not self._env.is_closed:
            self._env.close()

    def _find_dialogue(self, state: Any) -> "_History | _Text":
        from torchrl.data.llm import History

        one, batched = self._one(state), bool(self._env.batch_size)
        has_ids = any(key == ("tokens", "response") for key in self._env.action_keys)
        if isinstance(one.get(("history", "prompt"), None), History):
            return _History(batched, has_ids)
        for key in (("text", "prompt"), getattr(self._env, "str_key", "text")):
            if isinstance(one.get(key, None), str) or isinstance(getattr(one.get(key, None), "data", None), str):
                return _Text(self._env, key, batched, has_ids, self._template)
        keys = ", ".join(sorted(map(str, one.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf))))
        raise EnvError(
            f"{self._name} has neither ('history', 'prompt') nor ('text', 'prompt') nor 'text' to read; it has {keys}"
        )

    def _one(self, state: Any) -> Any:
        return state[0] if self._env.batch_size else state

    def _tensordict(self, entries: Mapping[str, Any]) -> Any:
        import torch
        from tensordict import NonTensorData, TensorDict

        size = self._env.batch_size
        values = {
            key: value.expand(*size, *value.shape)
            if isinstance(value, torch.Tensor)
            else NonTensorData(value, batch_size=size)
            for key, value in entries.items()
        }
        return TensorDict(values, batch_size=size, device=self._env.device)


class _History:
    """A conversation in ("history", "prompt"): a `History` of shape [1, messages], or [messages] without a batch."""

    def __init__(self, batched: bool, has_ids: bool) -> None:
        self._batched, self._has_ids = batched, has_ids

    def read(self, one: Any) -> list[Message]:
        return [_message(item) for item in one["history", "prompt"].unbind(0)]

    def answer(self, state: Any, completion: Completion) -> list[Message]:
        from torchrl.data.llm import History
        from torchrl.modules.llm.policies import ChatHistory

        prompt = state["history", "prompt"]
        said = [{"role": "assistant", "content": completion.text}]
        response = History.from_chats([said] if self._batched else said)
        full = prompt.extend(response, inplace=False, dim=-1)
        state.set(
            "history", ChatHistory(prompt=prompt, response=response, full=full, batch_size=prompt.batch_size[:-1])
        )
        if self._has_ids:
            _set_ids(state, completion)
        return [_message(item) for item in (full[0] if self._batched else full).unbind(0)]


class _Text:
    """A conversation in ("text", "prompt"), or in a text alone whose action is another one."""

    def __init__(self, env: Any, key: Any, batched: bool, has_ids: bool, template: str | None) -> None:
        self._key, self._batched, self._has_ids, self._template = key, batched, has_ids, template
        self._action = next((key for key in env.action_keys if key != ("tokens", "response")), None)
        # The text of a response ends as the model ended it; a completion comes without special tokens.
        self._end = getattr(getattr(env, "tokenizer", None), "eos_token", None) or ""

    def read(self, one: Any) -> Dialogue:
        return self._parse(one[self._key])

    def answer(self, state: Any, completion: Completion) -> Dialogue:
        from torchrl.modules.llm.policies import Text

        prompt = state[0][self._key] if self._batched else state[self._key]
        response = completion.text + (self._end if completion.finish_reason == "stop" else "")
        full = prompt + response
        if self._key == ("text", "prompt"):
            wrap = _stacked if self._batched else _alone
            text = Text(prompt=wrap(prompt), response=wrap(response), full=wrap(full), batch_size=state.batch_size)
            state.set("text", text)
        else:
            state.set(self._action, (_stacked if self._batched else _alone)(response))
        if self._has_ids:
            _set_ids(state, completion)
        return self._parse(full)

    def _parse(self, text: str) -> Dialogue:
        if self._template is None:
            return text
        from torchrl.data.llm import History

        try:
            items = History.from_text(text, chat_template_name=self._template).unbind(0)
        except NotImplementedError as error:
            raise SpecError(f"TorchRL does not parse text_template {self._template!r}: {error}") from error
        messages: list[Message] = [_message(item) for item in items]
        if not messages[-1]["content"] and messages[-1]["role"] == "assistant":
            messages.pop()  # the prompt for a response, not an empty one
        return messages


def _messages(dialogue: Dialogue) -> list[Message]:
    if not isinstance(dialogue, str):
        return dialogue
    return [{"role": "user", "content": dialogue}] if dialogue.strip() else []


def _message(item: Any) -> dict[str, Any]:
    """One item of a `History` as a message."""
    if not isinstance(item.content, str):
        raise EnvError(f"TorchRLEnv takes messages of text; got a content of type {type(item.content).__name__}")
    message: dict[str, Any] = {"role": item.role, "content": item.content}
    for key in ("tool_calls", "tool_responses"):
        if (value := getattr(item, key, None)) is not None:
            message[key] = value
    return message


def _set_ids(state: Any, completion: Completion) -> None:
    import torch

    ids = torch.tensor(list(completion.token_ids), dtype=torch.int64)
    state.set(("tokens", "response"), ids.expand(*state.batch_size, len(ids)))


def _alone(text: str) -> Any:
    from tensordict import NonTensorData

    return NonTensorData(text)


def _stacked(text: str) -> Any:
    from tensordict import NonTensorStack

    return NonTensorStack(text)


def _scalars(one: Any) -> dict[str, Any]:
    """What is worth keeping: texts, numbers, tensors of one element."""
    import torch

    found: dict[str, Any] = {}
    for key in one.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        if key in ("done", "terminated", "truncated", "reward", "text", "history", "tokens", "next"):
            continue
        value = one[key]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, str | int | float | bool):
            found[key] = value
    return found


def _is_leaf(kind: type) -> bool:
    from tensordict import is_leaf_nontensor

    return bool(is_leaf_nontensor(kind))


def _any(state: Any, key: str) -> bool:
    flag = state.get(key, None)
    return flag is not None and bool(flag.any())


def _pick_rows(env: Any, name: str) -> Callable[[int], None] | None:
    """How to have the env's data loader give one row next; None where the env has no loader.

    Raises:
        EnvError: The loader is one that only gives rows in its own order.
    """
    from torch.utils.data import DataLoader
    from torchrl.envs.llm.transforms import DataLoadingPrimer, RayDataLoadingPrimer

    transform = getattr(env, "transform", None)
    transforms = list(getattr(transform, "transforms", None) or ([transform] if transform is not None else []))
    primer = next((one for one in transforms if isinstance(one, DataLoadingPrimer | RayDataLoadingPrimer)), None)
    if primer is None:
        return None
    loader = None if isinstance(primer, RayDataLoadingPrimer) else primer.dataloader
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise EnvError(
            f"the data loader of {name} gives rows in an order of its own, so a group would not get one task: "
            f"use a torch DataLoader, outside of Ray, whose dataset has a length and can be indexed"
        )
    primer.dataloader_factory = None  # what is loaded is kept; resetting would load it again

    def pick(index: int) -> None:
        row = dataset[index % len(dataset)]
        primer.reset_dataloader()  # rows that were to come next
        primer.endless_dataloader = itertools.repeat(loader.collate_fn(row if loader.batch_size is None else [row]))

    return pick
