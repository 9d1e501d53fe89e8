"""Settings of the process, from environment variables `LLMCOLLECT_...`."""

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What belongs to a machine rather than to a run.

    Attributes:
        base: Folder or URL below which a run without a root of its own gets one, named by its flow run.
        cache: Folder for models that are made once.
        store_patience_s: How long an object store that has answered before is waited for while it does not.
        verbose: Let the libraries below (vLLM, transformers, Prefect) write what they like.
    """

    model_config = SettingsConfigDict(env_prefix="LLMCOLLECT_")

    base: str | None = None
    cache: Path = Path("~/.cache/llmcollect")
    store_patience_s: float = 300
    verbose: bool = False
