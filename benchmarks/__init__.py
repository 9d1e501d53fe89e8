"""Each module prints, as its last line, one JSON object: ratios against a limit or a peer, measured in the same run."""
