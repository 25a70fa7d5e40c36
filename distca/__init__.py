"""DistCA: long-context LLM training by core attention disaggregation. Importing it needs numpy only."""

__version__ = "0.1.0"
