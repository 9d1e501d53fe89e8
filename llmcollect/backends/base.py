"""What a backend is: the place where the shards of a collection run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from llmcollect.progress import ShardProgress
from llmcollect.run import RunSpec
from llmcollect.shard import Root
from llmcollect.store.record import CommitRecord

Delivery = tuple[pa.Table, Sequence[int]]
"""Rows of whole trajectories, failed ones included, and the numbers of the trajectories that finished with them."""


class Backend(Protocol):
    """One collection that runs somewhere else. Its methods may be called from any thread of the consumer's.

    Attributes:
        progress: One a shard.
    """

    @property
    def progress(self) -> list[ShardProgress]:
        """Counters, one a shard; they may lag."""
        ...

    def get(self) -> Delivery | None:
        """The rows of a commit, each trajectory once; None at the end; blocks. An interrupted call loses nothing.

        Raises:
            LLMCollectError: What ended the collection.
        """
        ...

    def release(self, trajectories: int) -> None:
        """So many trajectories no longer take up room. Does not wait."""
        ...

    def finish(self) -> None:
        """Let nothing new begin; what is in flight is finished and can be got. Does not wait."""
        ...

    def stop(self) -> None:
        """Give up what is in flight; what has finished is committed. Blocks until engines and envs are free."""
        ...

    def update_weights(self, folder: Path, version: int | None, policy: str) -> int:
        """Load other weights into the engines of a policy; the version that they have from now on; blocks.

        Raises:
            SpecError: This backend cannot.
            PolicyError: They could not be loaded; the old ones serve on.
        """
        ...


class BackendOptions(BaseModel):
    """What `backend_options` may hold for a backend; makes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, arbitrary_types_allowed=True)

    def default_shards(self, policies: int) -> int:
        """`num_shards` where none is given."""
        return max(1, policies)

    def check(self, spec: RunSpec, has_root: bool) -> None:
        """Whether such a run can run here; before anything starts.

        Raises:
            SpecError: It cannot.
        """

    @property
    def needs_stored(self) -> bool:
        """Whether `begin` has to know what the root holds."""
        return False

    def begin(self, spec: RunSpec, root: Root | None, rows: int, stored: Sequence[CommitRecord]) -> Backend:
        """Start a collection.

        Args:
            spec: The run.
            root: Its home, or None.
            rows: How many rows the consumer takes at once.
            stored: The commits in the root, none of whose rows are to be delivered; empty unless `needs_stored`.
        """
        raise NotImplementedError
