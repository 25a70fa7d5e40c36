"""Document sources: where documents come from, with lengths known before any token is read."""

from distca.data.sources.opening import KINDS, SourceKind, open_source, passed_over
from distca.data.sources.source import DocumentSource

__all__ = ["KINDS", "DocumentSource", "SourceKind", "open_source", "passed_over"]
