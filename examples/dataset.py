"""Prompts from a file, and from any iterable, with a reward function by name.

python examples/dataset.py
"""

import json
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from llmcollect import LLMCollector, Sampling
from llmcollect.envs import DatasetEnv
from llmcollect.policies import VLLMPolicy

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid", "Peru": "Lima"}
ITEMS = [{"prompt": f"What is the capital of {country}?", "answer": city} for country, city in CAPITALS.items()]


def names_it(response: str, item: dict[str, Any]) -> float:
    """1 if the answer is in the response. Gets the response's text and the item of the dataset."""
    return float(item["answer"].lower() in response.lower())


def make_loader() -> Iterable[Any]:
    """Any iterable of texts, messages or dicts does, batched or not."""
    return DataLoader(ITEMS, batch_size=2)  # type: ignore[arg-type]


def main(policy: Any = partial(VLLMPolicy, "smollm2")) -> int:
    steps = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "capitals.jsonl"  # .parquet, a folder of either, a Hugging Face folder: the same
        file.write_text("\n".join(map(json.dumps, ITEMS)))
        collector = LLMCollector(
            env=[
                (partial(DatasetEnv, str(file), reward=names_it), 1.0),
                (DatasetEnv.from_dataloader(make_loader, reward=names_it, system="Answer in one word."), 1.0),
            ],
            policy=policy,
            num_groups=12,
            group_size=2,
            steps_per_batch=8,
            sampling=Sampling(max_tokens=32, temperature=0.7),
        )
        for batch in collector:
            for task, response, reward in zip(
                batch["text", "task"], batch["text", "response"], batch["next", "reward"][:, 0].tolist(), strict=True
            ):
                print(f"{reward:g}  {json.loads(task)['info']['item']['prompt']}  {response!r}")
            steps += len(batch)
    return steps


if __name__ == "__main__":  # vLLM starts processes by spawn
    main()
