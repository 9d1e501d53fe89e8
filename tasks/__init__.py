"""Prefect tasks: thin skins around llmcollect."""
