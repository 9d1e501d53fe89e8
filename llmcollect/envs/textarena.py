"""TextArenaEnv: the single-player games of TextArena, one turn a message."""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

from llmcollect.envs.base import opening
from llmcollect.errors import SpecError
from llmcollect.types import Completion, Observation, Task, Transition

# Games draw from Python's global generator, so their calls take turns, each with the state of its own game.
_turn = threading.Lock()


class TextArenaEnv:
    """A game of TextArena (github.com/LeonGuertler/TextArena) for one player.

    The game's first message is the rules; after each move it says what is new, so the conversation only grows. The
    reward comes with the last step, and is the game's own.

    Args:
        game: Name in TextArena's registry, such as "GuessTheNumber-v0", "Wordle-v0" or "Mastermind-v0".
        system: A system message to begin with.
        **options: The game's own settings, such as `max_number=50`.

    Raises:
        SpecError: There is no such game, it does not take these options, or it is not for one player.
    """

    def __init__(self, game: str, *, system: str | None = None, **options: Any) -> None:
        # The variants without wrappers report each message once; those of the plain name repeat the whole history.
        name = game if game.endswith("-raw") else f"{game}-raw"
        make, known = _registry()
        if name not in known:
            raise SpecError(f"TextArena has no game {game!r}; for one player it has, among others, {_some(known)}")
        self._system = system
        self._game_name = game
        self._random = random.Random(0).getstate()
        try:
            self._game = make(name, **options)
            with self._own_random():
                self._game.reset(num_players=1, seed=0)
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise SpecError(f"TextArena does not play {game!r} with one player and {options!r}: {why}") from error

    def reset(self, task: Task) -> Observation:
        """The rules of the game that the task's seed gives."""
        self._random = random.Random(task.seed).getstate()
        with self._own_random():
            self._game.reset(num_players=1, seed=task.seed)
            rules = self._news()
        return Observation(
            messages=opening(self._system, [{"role": "user", "content": rules}]),
            info={"game": self._game_name, "state": dict(self._game.state.game_state or {})},
        )

    def step(self, completion: Completion) -> Transition:
        """Make the move that the response is."""
        with self._own_random():
            done, info = self._game.step(action=completion.text)
            news = self._news()
            rewards, about = self._game.close() if done else ({}, {})
        if not done:
            return Transition(observation=Observation.user(news or "Your move."), info=dict(info or {}))
        return Transition(
            reward=float((rewards or {}).get(0, 0.0)),
            observation=Observation.user(news) if news else None,
            terminated=True,
            info={**(info or {}), **(about or {}).get(0, {})},
        )

    def _news(self) -> str:
        """What the game has said since the last time, the player's own moves left out."""
        _, messages = self._game.get_observation()
        if isinstance(messages, str):
            return messages
        return "\n".join(text for sender, text, _ in messages if sender != 0)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """The global generator is this game's within the block, and nobody else's game runs meanwhile."""
        with _turn:
            others = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(others)


def _registry() -> tuple[Any, dict[str, Any]]:
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise SpecError(f"TextArenaEnv needs textarena: pip install 'llmcollect[envs]' ({error})") from error
    return textarena.make, ENV_REGISTRY


def _some(known: dict[str, Any]) -> str:
    wanted = ("GuessTheNumber-v0", "Hangman-v0", "Mastermind-v0", "Sudoku-v0", "TowerOfHanoi-v0", "Wordle-v0")
    return ", ".join(name for name in wanted if name in known)
