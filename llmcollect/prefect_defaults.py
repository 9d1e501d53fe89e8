"""Defaults for Prefect, set unless the user has set them. Import this before prefect: it reads them once.

Analytics are off: a collection should talk to nobody. The embedded server gets 90 s to start, where Prefect's own 20 s
are too few for a busy machine with a new database.
"""

import os

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
