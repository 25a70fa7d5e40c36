"""Document sources: where documents come from, with lengths known before any token is read."""

from distca.data.sources.opening import KINDS, open_source
from distca.data.sources.source import DocumentSource

__all__ = ["KINDS", "DocumentSource", "open_source"]
