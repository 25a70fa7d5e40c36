"""The time after which a collective that does not end fails."""

from datetime import timedelta

TIMEOUT = timedelta(minutes=10)
"""The timeout of every process group ends ranks that nobody watches. It is long enough for slow file systems."""
