"""Text that is yet to be tokenized: files of several kinds, read in blocks that processes of their own can work on."""

from distca.data.texts.blocks import Block, Refused, Row
from distca.data.texts.opening import TEXT_KINDS, TextKind, Texts, open_texts

__all__ = ["TEXT_KINDS", "Block", "Refused", "Row", "TextKind", "Texts", "open_texts"]
