"""ReasoningGymEnv: the procedural tasks of reasoning-gym, one question and one answer."""

import re
import warnings
from typing import Any, Literal

from llmcollect.envs.base import opening
from llmcollect.errors import SpecError
from llmcollect.types import Completion, Observation, Task, Transition

_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnv:
    """A task of reasoning-gym (github.com/open-thought/reasoning-gym): single-turn, scored by the task itself.

    Args:
        dataset: Name of the task, such as "gcd" or "chain_sum".
        extract: Where the answer is in a response: "tag" takes what stands in the last `<answer>` element, "number" the
            last number, "text" all of it. "auto": the tag if there is one, else the last number if the right answer is
            one, else the text.
        system: A system message to begin with.
        suffix: Text to append to each question.
        **config: The task's own settings, such as `max_value=12`.

    Raises:
        SpecError: There is no such task, or it has no such setting or value.
    """

    def __init__(
        self,
        dataset: str,
        *,
        extract: Literal["auto", "tag", "number", "text"] = "auto",
        system: str | None = None,
        suffix: str = "",
        **config: Any,
    ) -> None:
        if extract not in ("auto", "tag", "number", "text"):
            raise SpecError(f'extract must be "auto", "tag", "number" or "text"; got {extract!r}')
        self._create = _importable_factory()
        self._name, self._config = dataset, config
        self._extract, self._system, self._suffix = extract, system, suffix
        try:
            self._dataset = self._create(dataset, seed=0, size=1, **config)
        except (AssertionError, TypeError, ValueError) as error:
            raise SpecError(f"reasoning-gym does not take {dataset!r} with {config!r}: {error}") from error
        self._item: dict[str, Any] = {}

    def reset(self, task: Task) -> Observation:
        """The question that the task's seed gives."""
        self._dataset = self._create(self._name, seed=task.seed, size=1, **self._config)
        self._item = self._dataset[0]
        user = {"role": "user", "content": self._item["question"] + self._suffix}
        return Observation(
            messages=opening(self._system, [user]),
            info={"dataset": self._name, "answer": self._item["answer"], "metadata": self._item["metadata"]},
        )

    def step(self, completion: Completion) -> Transition:
        """The task's score of the answer, from 0 to 1."""
        answer = self.find_answer(completion.text)
        score = float(self._dataset.score_answer(answer, self._item))
        return Transition(reward=score, terminated=True, info={"answer": answer})

    def find_answer(self, text: str) -> str | None:
        """The answer in a response; None if there is none."""
        tags = _TAG.findall(text)
        if self._extract == "tag" or (self._extract == "auto" and tags):
            return tags[-1].strip() if tags else None
        expected = str(self._item.get("answer", ""))
        if self._extract == "number" or (self._extract == "auto" and _NUMBER.fullmatch(expected)):
            found = _NUMBER.findall(text)
            return found[-1] if found else None
        return text.strip()


def _importable_factory() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # one of its own dependencies has some
            from reasoning_gym.factory import create_dataset
    except ImportError as error:
        raise SpecError(f"ReasoningGymEnv needs reasoning-gym: pip install 'llmcollect[envs]' ({error})") from error
    return create_dataset
