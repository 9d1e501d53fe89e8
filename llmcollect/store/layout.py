"""The one place that knows the names of files below a root."""

RUN = "run.json"
STEPS_GLOB = "steps/**/*.parquet"


def commit_path(shard: int, number: int) -> str:
    """The commit of a shard with this number, counting from 0."""
    return f"steps/shard-{shard:05d}/{number:08d}.parquet"


def end_path(shard: int, commits: int) -> str:
    """Says that a shard is complete with so many commits.

    The number is part of the name so that a reader that waits for commit n asks for two names and lists nothing, and
    so that a run whose `num_groups` has grown gets a new end without replacing the old one.
    """
    return f"ends/shard-{shard:05d}/{commits:08d}.json"
