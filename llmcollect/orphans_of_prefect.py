"""What the entry point of Prefect's plugins names: a module, because Prefect imports it and calls nothing."""

from llmcollect.orphans import watch_parent

watch_parent()
