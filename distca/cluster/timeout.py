"""The timeout of process groups."""

from datetime import timedelta

TIMEOUT = timedelta(minutes=10)
"""The longest time of a collective in any process group; then its rank fails. It is long enough for slow file systems.
Usually the watch over ranks (``health.py``) ends a stuck run much sooner."""
