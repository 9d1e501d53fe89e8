"""Where shards live. Everything is put if absent; nothing is ever replaced or deleted.

ROOT/run.json                            RunRecord: the spec, the format version      record.py
ROOT/steps/shard-00003/00000017.parquet  a commit: whole trajectories, its
                                         CommitRecord in the Parquet footer           commit.py
ROOT/ends/shard-00003/00000018.json      EndRecord: complete with 18 commits          record.py
ROOT/.tmp/                               halves of files that are not there yet       files.py (local folders)

files.py and its kinds  <-  commit.py, catalog.py  <-  writer.py (committer.py before it), reader.py, tail.py, verify.py
"""

from llmcollect.store.reader import Run, open_run
from llmcollect.store.record import RunRecord, create_or_check_run
from llmcollect.store.trajectory import StoredTrajectory
from llmcollect.store.verify import verify
from llmcollect.store.writer import ShardWriter

__all__ = ["Run", "RunRecord", "ShardWriter", "StoredTrajectory", "create_or_check_run", "open_run", "verify"]
