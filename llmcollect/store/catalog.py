"""Catalog: which commits and ends a root holds, by one listing."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmcollect.errors import CorruptFileError, StoreError
from llmcollect.store import layout
from llmcollect.store.files import Files


@dataclass(frozen=True, slots=True)
class Catalog:
    """Files by shard and number.

    Attributes:
        commits: For each shard the sizes in bytes of its commits, by number.
        ends: For each shard the numbers of commits with which it has ended.
        foreign: Files that belong to no run of this format.
        gaps: Commits that are missing although a later one of their shard is there.
    """

    commits: dict[int, dict[int, int]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    def places(self) -> list[tuple[int, int]]:
        """Shard and number of every commit, in order."""
        return [(shard, number) for shard in sorted(self.commits) for number in sorted(self.commits[shard])]

    def check(self, root: str) -> None:
        """Refuse to go on with a root in which something is not as it must be.

        Raises:
            StoreError: There is a file that belongs to no run.
            CorruptFileError: A commit is missing.
        """
        if self.foreign:
            raise StoreError(f"{root}/{self.foreign[0]} is no file of a run of llmcollect: move it elsewhere")
        if self.gaps:
            raise CorruptFileError(
                f"{root}/{self.gaps[0]} is missing, and a later commit of its shard is there: "
                f"bring it back, or collect into another root"
            )


def list_shard(files: Files, shard: int) -> Catalog:
    """The commits of one shard."""
    return _catalog(files, files.sizes(layout.shard_folder(shard)), {}, None)


def list_run(files: Files, num_shards: int, ends: bool = False) -> Catalog:
    """The commits of all shards, and if asked for the ends."""
    return _catalog(files, files.sizes(layout.STEPS), files.sizes(layout.ENDS) if ends else {}, num_shards)


def _catalog(files: Files, steps: dict[str, int], ends: dict[str, int], num_shards: int | None) -> Catalog:
    catalog = Catalog()
    for path, size in steps.items():
        place = layout.parse_commit_path(path)
        if place is None or (num_shards is not None and place[0] >= num_shards):
            catalog.foreign.append(path)
        else:
            catalog.commits.setdefault(place[0], {})[place[1]] = size
    for path in ends:
        place = layout.parse_end_path(path)
        if place is None or (num_shards is not None and place[0] >= num_shards):
            catalog.foreign.append(path)
        else:
            catalog.ends.setdefault(place[0], []).append(place[1])
    # A listing takes a while: a commit may have come after its place in it had been passed.
    missing = list(_missing(catalog))
    found = files.read_many([layout.commit_path(*place) for place in missing], last=1)
    for (shard, number), data in zip(missing, found, strict=True):
        if data is None:
            catalog.gaps.append(layout.commit_path(shard, number))
        else:
            catalog.commits[shard][number] = 0
    return catalog


def _missing(catalog: Catalog) -> Iterator[tuple[int, int]]:
    for shard, sizes in catalog.commits.items():
        yield from ((shard, number) for number in range(max(sizes)) if number not in sizes)
