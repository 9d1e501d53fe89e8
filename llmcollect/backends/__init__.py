"""Where shards run. `local`: on this process's engine thread."""
