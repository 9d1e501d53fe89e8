"""Datasets: item i for task i, from files and from any iterable, one reader, skipped to by number."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from llmcollect import LLMCollector, open_run
from llmcollect.envs import DatasetEnv
from llmcollect.envs.items import LoaderItems, open_items
from llmcollect.errors import EnvError, SpecError
from llmcollect.types import Completion, Task
from tests.fakes import BytePolicy

ITEMS: list[dict[str, Any]] = [{"prompt": f"question {i}", "answer": i} for i in range(7)]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def length(response: str, item: dict[str, Any]) -> float:
    """A reward."""
    return len(response) + item.get("answer", 0)


async def later(response: str, item: dict[str, Any]) -> float:
    """A reward that is awaited."""
    return 0.5


def make_loader() -> Iterable[Any]:
    """What a user writes."""
    return DataLoader(ITEMS, batch_size=3)  # type: ignore[arg-type]


def write(folder: Path, kind: str) -> Path:
    """The items in each form that can be read."""
    table = pa.Table.from_pylist(ITEMS)
    match kind:
        case "jsonl":
            file = folder / "data.jsonl"
            file.write_text("\n".join(map(json.dumps, ITEMS)) + "\n\n")
            return file
        case "parquet":
            pq.write_table(table, folder / "data.parquet", row_group_size=3)
            return folder / "data.parquet"
        case "folder":
            (folder / "data").mkdir()
            for i, part in enumerate((table[:3], table[3:])):
                pq.write_table(part, folder / "data" / f"train-0000{i}.parquet")
            pq.write_table(table[:1], folder / "data" / "test-00000.parquet")
            return folder
        case "saved":  # datasets.Dataset.save_to_disk
            write_saved(folder, table)
            return folder
        case _:  # datasets.DatasetDict.save_to_disk
            (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
            for split, rows in (("train", table), ("test", table[:1])):
                (folder / split).mkdir()
                write_saved(folder / split, rows)
            return folder


def write_saved(folder: Path, table: pa.Table) -> None:
    names = []
    for i, part in enumerate((table[:2], table[2:])):
        names.append({"filename": f"data-{i:05d}-of-00002.arrow"})
        with pa.ipc.new_stream(str(folder / names[-1]["filename"]), table.schema) as stream:
            stream.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "saved", "splits"])
def test_task_i_is_item_i_over_epochs(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    env = DatasetEnv(str(path), reward=length, split="train" if kind in ("folder", "splits") else None)
    for index in (0, 6, 3, 7, 13, 14):
        observation = env.reset(Task(index, 0))
        assert observation.messages == ({"role": "user", "content": f"question {index % 7}"},)
        assert observation.info["item"] == ITEMS[index % 7]
    assert DatasetEnv(str(path), reward=length, system="s").reset(Task(0, 0)).messages[0]["role"] == "system"


def test_a_split_is_chosen_by_name(tmp_path: Path) -> None:
    assert open_items(str(write(tmp_path, "splits")), "test").item(1) == ITEMS[0]
    with pytest.raises(SpecError, match="no split 'dev'; it has train, test"):
        open_items(str(tmp_path), "dev")


@pytest.mark.parametrize(
    ("item", "options", "messages"),
    [
        ({"messages": [*CHAT, {"role": "assistant", "content": "the answer"}], "prompt": "not this"}, {}, CHAT),
        ({"prompt": CHAT}, {}, CHAT),
        ({"question": "why?"}, {"prompt": "question"}, [{"role": "user", "content": "why?"}]),
        ("why?", {}, [{"role": "user", "content": "why?"}]),
        (CHAT, {}, CHAT),
    ],
)
def test_prompts_are_texts_or_messages(item: Any, options: dict[str, Any], messages: list[Any]) -> None:
    env = DatasetEnv(loader=lambda: [item], reward=length, **options)
    assert list(env.reset(Task(0, 0)).messages) == messages


def test_messages_of_a_table_lose_the_keys_that_arrow_added(tmp_path: Path) -> None:
    call = {"role": "user", "content": "x", "name": "n"}
    pq.write_table(pa.Table.from_pylist([{"messages": [*CHAT, call]}]), tmp_path / "a.parquet")
    assert list(DatasetEnv(str(tmp_path / "a.parquet"), reward=length).reset(Task(0, 0)).messages) == [*CHAT, call]


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "items": lambda: list(ITEMS),
    "batches of items": lambda: [ITEMS[:3], ITEMS[3:]],
    "collated": lambda: DataLoader(ITEMS, batch_size=3),  # type: ignore[arg-type]
    "not collated": lambda: DataLoader(ITEMS, batch_size=2, collate_fn=list),  # type: ignore[arg-type]
    "not batched": lambda: DataLoader(ITEMS, batch_size=None),  # type: ignore[arg-type]
    "columns": lambda: [{"prompt": [i["prompt"] for i in ITEMS], "answer": [i["answer"] for i in ITEMS]}],
    "a generator": lambda: (item for item in ITEMS),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_numbered_over_batches_and_epochs(kind: str) -> None:
    items = LoaderItems(LOADERS[kind])
    assert [items.item(index) for index in (0, 1, 6, 5, 7, 16)] == [ITEMS[i] for i in (0, 1, 6, 5, 0, 2)]


@given(st.lists(st.integers(0, 60), max_size=20))
def test_any_order_of_questions_gives_the_same_items(indices: list[int]) -> None:
    items = LoaderItems(lambda: [[str(i) for i in range(5)], [str(i) for i in range(5, 11)]])
    assert [items.item(index)["prompt"] for index in indices] == [str(index % 11) for index in indices]


def test_there_is_one_reader_whoever_asks() -> None:
    read = []

    def make() -> Iterator[str]:
        for i in range(1000):
            read.append(threading.get_ident())
            yield str(i)

    collector = LLMCollector(
        env=DatasetEnv.from_dataloader(make, reward=length),
        policy=BytePolicy,
        num_groups=50,
        group_size=3,
        num_shards=2,
        steps_per_batch=10,
    )
    prompts = [text for batch in collector for text in batch["text", "messages"]]
    assert sorted(prompts) == sorted(
        json.dumps([{"content": str(i), "role": "user"}], separators=(",", ":")) for i in range(50) for _ in range(3)
    )
    assert len(read) == 50


def test_a_run_over_a_loader_is_stored_and_resumed_by_number(tmp_path: Path) -> None:
    def collect(groups: int) -> int:
        env = DatasetEnv.from_dataloader(make_loader, reward=later)
        return sum(map(len, LLMCollector(env, BytePolicy, num_groups=groups, steps_per_batch=5, root=tmp_path)))

    assert (collect(4), collect(10)) == (4, 6)
    rows = open_run(tmp_path).to_arrow().to_pylist()
    assert {row["task_index"]: json.loads(row["task"])["info"]["item"] for row in rows} == {
        i: ITEMS[i % 7] for i in range(10)
    }
    assert {row["reward"] for row in rows} == {0.5}
    assert open_run(tmp_path).spec.envs[0].kwargs == {
        "loader": "tests.envs.test_dataset:make_loader",
        "reward": "tests.envs.test_dataset:later",
    }


def test_the_reward_gets_response_and_item() -> None:
    env = DatasetEnv(loader=lambda: ITEMS, reward="tests.envs.test_dataset:length")
    env.reset(Task(5, 0))
    transition = env.step(Completion("four", {"role": "assistant", "content": "four"}, [1], "stop"))
    assert (transition.reward, transition.terminated) == (9, True)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"path": "/no/such.jsonl", "reward": length}, "there is no dataset '/no/such.jsonl'"),
        ({"path": "{tmp}/folder", "reward": length}, "holds no .parquet, .jsonl or .arrow files"),
        ({"path": "{tmp}/empty.jsonl", "reward": length}, "holds no items"),
        ({"path": "{tmp}/text.csv", "reward": length}, "datasets are .jsonl"),
        ({"path": "{tmp}/bad.jsonl", "reward": "nowhere"}, 'looks like "package.module:Name"'),
        ({"path": "{tmp}/bad.jsonl", "reward": "tests.fakes:missing"}, "has no 'missing'"),
        ({"reward": length}, "either a path or a loader"),
    ],
)
def test_what_is_no_dataset_is_refused(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    for name in ("empty.jsonl", "text.csv", "bad.jsonl"):
        (tmp_path / name).write_text("" if name.startswith("empty") else "x\n")
    (tmp_path / "folder").mkdir()
    if "path" in arguments:
        arguments = {**arguments, "path": arguments["path"].format(tmp=tmp_path)}
    with pytest.raises(SpecError) as caught:
        DatasetEnv(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (list, "yields nothing"),
        (lambda: [42], "must yield texts, messages or dicts; got int"),
        (lambda: [{"text": "a"}], "no column 'prompt'; it has 'text'"),
        (lambda: [{"prompt": 3}], "must hold a text or a list of messages; got 3"),
        (lambda: iter(lambda: 1 / 0, 1), "the loader raised ZeroDivisionError"),
    ],
)
def test_an_item_that_cannot_be_asked_is_named(loader: Any, words: str) -> None:
    env = DatasetEnv(loader=loader, reward=length)
    with pytest.raises(EnvError, match=words):
        env.reset(Task(0, 0))


def test_a_line_that_is_no_json_costs_its_own_trajectories(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n{"prompt": "c"}\n')
    env = DatasetEnv(str(file), reward=length)
    with pytest.raises(EnvError, match="line 2 of"):
        env.reset(Task(1, 0))
    assert env.reset(Task(2, 0)).info["item"] == {"prompt": "c"}
