"""Stored rows for training: an IterableDataset for torch's DataLoader, and the filling of a replay buffer."""

import importlib
import os
from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from llmcollect.batch import StepBatch
from llmcollect.store.reader import Run, open_run
from llmcollect.store.selection import Filters, Selection
from llmcollect.tensors import StepTensorDict


class StepDataset(IterableDataset[StepTensorDict]):
    """See `Run.torch_dataset`.

    Raises:
        ValueError: A size below 1, or a rank outside of the world.
    """

    def __init__(
        self,
        run: Run,
        selection: Selection,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        shuffle_buffer: int,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        if batch_size < 1 or shuffle_buffer < 1:
            raise ValueError(f"batch_size and shuffle_buffer must be at least 1; got {batch_size}, {shuffle_buffer}")
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
        world = world_size if world_size is not None else torch.distributed.get_world_size() if distributed else 1
        if not 0 <= self._rank < world:
            raise ValueError(f"rank must be at least 0 and below world_size; got {self._rank} of {world}")
        self._world_size = world
        self._run, self._selection = run, selection
        self._batch_size, self._shuffle, self._seed, self._buffer = batch_size, shuffle, seed, shuffle_buffer
        self._epoch = 0
        # Once, here: ranks and workers must deal out the same commits while the run may still grow.
        self._commits = [record for record in run.commits() if selection.may_hold(record)]

    def set_epoch(self, epoch: int) -> None:
        """Another number gives another order, with `shuffle`; the same on every rank."""
        self._epoch = epoch

    def loader(self, num_workers: int = 0, **options: Any) -> "DataLoader[StepTensorDict]":
        """A DataLoader of these batches as they are.

        Made by hand it needs `batch_size=None` and `collate_fn=same`: torch's own conversion takes a TensorDict for a
        dict, and fails.

        Args:
            num_workers: Processes that read.
            **options: Further arguments of `torch.utils.data.DataLoader`.
        """
        importlib.import_module("llmcollect.padding")  # compiled here, so that forked workers have it
        return DataLoader(self, batch_size=None, collate_fn=same, num_workers=num_workers, **options)

    def __iter__(self) -> Iterator[StepTensorDict]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        place, places = self._rank * workers + number, self._world_size * workers
        order = np.arange(len(self._commits))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        mine = [self._commits[index] for index in order[place::places]]
        run = self._run.reopened() if worker else self._run
        batches: Iterator[StepBatch] = (StepBatch(table) for _, table in run.read(mine, self._selection))
        if self._shuffle:
            batches = self._shuffled(batches, np.random.default_rng((self._seed, self._epoch, place)))
        held = StepBatch.concat([])
        for batch in batches:
            held = StepBatch.concat([held, batch]) if len(held) else batch
            whole = len(held) // self._batch_size * self._batch_size
            for part in held[:whole].split(self._batch_size):
                yield part.to_tensordict()
            held = held[whole:].compact()
        if len(held):
            yield held.to_tensordict()

    def _shuffled(self, batches: Iterator[StepBatch], random: np.random.Generator) -> Iterator[StepBatch]:
        """Rows drawn at random from a buffer that is filled up to `shuffle_buffer` rows, and drained by half."""
        held: list[StepBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(map(len, held)) >= self._buffer:
                whole = StepBatch.concat(held)
                order = random.permutation(len(whole))
                half = max(len(whole) - self._buffer // 2, 1)
                yield whole[order[:half]]
                held = [whole[np.sort(order[half:])].compact()] if half < len(whole) else []
        if held:
            whole = StepBatch.concat(held)
            yield whole[random.permutation(len(whole))]


def same(batch: StepTensorDict) -> StepTensorDict:
    """The batch: a `collate_fn` for batches that are whole already."""
    return batch


def fill(
    replay_buffer: Any, root: str | os.PathLike[str], *, batch_size: int = 1024, **filters: Unpack[Filters]
) -> int:
    """Extend a replay buffer with the stored rows of a run, as StepTensorDicts of up to `batch_size` rows.

    Args:
        replay_buffer: Anything with `extend`.
        root: Of the run.
        batch_size: Rows of one `extend`.
        **filters: Which trajectories: see `llmcollect.store.selection.Filters`.

    Returns:
        Number of rows.
    """
    rows = 0
    for batch in open_run(root).steps(**filters):
        for part in batch.split(batch_size):
            replay_buffer.extend(part.to_tensordict())
            rows += len(part)
    return rows
