"""Games: the conversation only grows, a seed is a game, and games beside each other do not mix their draws."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llmcollect.envs import TextArenaEnv
from llmcollect.errors import SpecError
from llmcollect.types import Completion, Task
from tests.test_shard import by_trajectory, collect, spec

GAME = "GuessTheNumber-v0"


def move(text: str) -> Completion:
    return Completion(text, {"role": "assistant", "content": text}, [1], "stop")


def play(env: TextArenaEnv, seed: int) -> list[Any]:
    """Count up to the number."""
    story: list[Any] = [env.reset(Task(0, seed)).messages[0]["content"]]
    for guess in range(1, 21):
        transition = env.step(move(f"[{guess}]"))
        story.append((transition.reward, transition.terminated, transition.observation))
        if transition.terminated:
            break
    return story


def test_a_game_is_played_to_its_end() -> None:
    env = TextArenaEnv(GAME, max_number=5)
    start = env.reset(Task(0, 3))
    assert "between 1 and 5" in start.messages[0]["content"]
    number = start.info["state"]["game_number"]
    wrong = env.step(move(f"[{number % 5 + 1}]"))
    assert not wrong.terminated
    assert wrong.reward is None
    assert wrong.observation is not None
    assert wrong.observation.messages[0]["content"].startswith("The target number is"), "only what is new"
    right = env.step(move(f"it is [{number}]"))
    assert (right.reward, right.terminated, right.info["turn_count"]) == (1.0, True, 2)


def test_a_seed_is_a_game_whoever_else_plays() -> None:
    env = TextArenaEnv("TowerOfHanoi-v0"), TextArenaEnv(GAME)
    alone = [play(env[1], seed) for seed in range(8)]
    assert len({story[0] for story in alone}) == 1
    assert len(set(map(len, alone))) > 1, "seeds differ"

    def one(seed: int) -> list[Any]:
        return play(TextArenaEnv(GAME), seed)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == alone


def test_the_global_generator_is_left_alone() -> None:
    random.seed(7)
    state = random.getstate()
    play(TextArenaEnv(GAME), 1)
    assert random.getstate() == state


def test_games_are_collected_turn_by_turn() -> None:
    run = spec(num_groups=2, limits={"max_turns": 3}).model_dump()
    run["envs"] = [{"target": "llmcollect.envs:TextArenaEnv", "kwargs": {"game": GAME}}]
    _, rows = collect(type(spec()).parse(run))
    for steps in by_trajectory(rows).values():
        assert 1 < len(steps) <= 3
        assert steps[-1]["terminated"] or steps[-1]["truncated"]


@pytest.mark.parametrize(
    ("game", "options", "words"),
    [
        ("Nope-v0", {}, "no game 'Nope-v0'; for one player it has, among others, GuessTheNumber-v0"),
        ("TicTacToe-v0", {}, "with one player"),
        (GAME, {"max_numbr": 3}, "max_numbr"),
    ],
)
def test_what_cannot_be_played_is_refused(game: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        TextArenaEnv(game, **options)
