"""Recurrent layers: where the pieces of documents lie, and which rows and states travel between them."""
