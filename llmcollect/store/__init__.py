"""Where shards live. Everything is put if absent; nothing is ever replaced or deleted.

ROOT/run.json                            RunRecord: the spec, the format version      record.py
ROOT/steps/shard-00003/00000017.parquet  a commit: whole trajectories, its
                                         CommitRecord in the Parquet footer           writer.py, reader.py
ROOT/ends/shard-00003/00000018.json      EndRecord: complete with 18 commits          writer.py, reader.py
ROOT/.tmp/                               halves of files that are not there yet       files.py
"""

from llmcollect.store.reader import Run, StoredTrajectory, open_run
from llmcollect.store.record import RunRecord, create_or_check_run
from llmcollect.store.writer import ShardWriter

__all__ = ["Run", "RunRecord", "ShardWriter", "StoredTrajectory", "create_or_check_run", "open_run"]
