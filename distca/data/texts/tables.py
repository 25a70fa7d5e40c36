"""Blocks of tables: Parquet files, and the Arrow files of a folder that the library ``datasets`` saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distca.data.texts.blocks import RowsBlock
from distca.errors import DataError, VersionError

_ROWS = 512


def table_blocks(kind: str, file: Path, column: str, beside: Sequence[str] = ()) -> Iterator[RowsBlock]:
    """All rows of one column of a Parquet or Arrow file, in order, and of those columns ``beside`` that it has.

    Raises:
        DataError: it cannot be read, or has no such column.
        VersionError: the package pyarrow is missing.
    """
    arrow = _package()
    first, size, given = 1, file.stat().st_size, 0
    try:
        for columns, share in (_of_parquet if kind == "parquet" else _of_arrow)(file, column, beside):
            read, values = int(size * share) - given, columns.pop(column)
            yield RowsBlock(str(file), first, values, read, columns)
            first, given = first + len(values), given + read
    except (arrow.ArrowException, OSError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{file} is no {kind.capitalize()} file that can be read ({said}); copy it again.") from None


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that ``datasets`` saved to disk, in order.

    Raises:
        DataError: it is no such folder, or one of several splits.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            one = f", such as {folder / splits[0]}" if splits else ""
            raise DataError(f"{folder} holds the splits {', '.join(splits)}; set `path` to one of them{one}.")
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [each["filename"] for each in state["_data_files"]]
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
        raise DataError(
            f"{folder} is no folder that the library datasets saved to disk (its state.json is missing or damaged); "
            "save it with save_to_disk, or set `source` to what the folder holds."
        ) from None
    return [folder / name for name in names]


def _of_parquet(file: Path, column: str, beside: Sequence[str]) -> Iterator[tuple[dict[str, list[Any]], float]]:
    """(values of some rows by column, share of the file that was read by then)."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file) as table:
        columns = _columns(file, column, beside, table.schema_arrow.names)
        rows, done = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
            done += batch.num_rows
            yield {name: batch.column(name).to_pylist() for name in columns}, done / rows


def _of_arrow(file: Path, column: str, beside: Sequence[str]) -> Iterator[tuple[dict[str, list[Any]], float]]:
    import pyarrow as arrow

    with arrow.memory_map(str(file)) as mapped, arrow.ipc.open_stream(mapped) as stream:
        columns = _columns(file, column, beside, stream.schema.names)
        for batch in stream:
            for start in range(0, batch.num_rows, _ROWS):
                parts = {name: batch.column(name).slice(start, _ROWS).to_pylist() for name in columns}
                yield parts, mapped.tell() / max(mapped.size(), 1)


def _columns(file: Path, column: str, beside: Sequence[str], names: list[str]) -> list[str]:
    """Those to read."""
    if column not in names:
        raise DataError(f"{file} has no column {column!r}, but {', '.join(names)}; set `field` to one of them.")
    return [column, *(name for name in beside if name in names)]


def _package() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise VersionError("Parquet and Arrow files need the package pyarrow: pip install 'distca[data]'.") from None
    return pyarrow
