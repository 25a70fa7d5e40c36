"""Names of pieces of tensors: where a folder has one tensor for all experts of a layer, each expert's is a piece."""

from __future__ import annotations


def piece_name(tensor: str, number: int) -> str:
    """The name of what a tensor holds at ``number`` of its first dimension."""
    return f"{tensor}#{number}"


def tensor_and_piece(name: str) -> tuple[str, int | None]:
    """The tensor that a name stands for a piece of, and which; of the name of a whole tensor no number."""
    tensor, hash_sign, number = name.partition("#")
    return tensor, int(number) if hash_sign else None
