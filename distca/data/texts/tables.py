"""Blocks of tables: Parquet files, and the Arrow files of a folder that the library ``datasets`` saved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distca.data.texts.blocks import RowsBlock
from distca.errors import DataError, VersionError, system_words
from distca.json_file import inside, open_regular, read_object

_ROWS = 512


def table_blocks(kind: str, file: Path, column: str, beside: Sequence[str] = ()) -> Iterator[RowsBlock]:
    """All rows of one column of a Parquet or Arrow file, in order, and of those columns ``beside`` that it has.

    Raises:
        DataError: it cannot be read, or has no such column.
        VersionError: the package pyarrow is missing.
    """
    arrow = _package()
    first, given = 1, 0
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
        for columns, share in (_of_parquet if kind == "parquet" else _of_arrow)(file, column, beside):
            read, values = int(size * share) - given, columns.pop(column)
            yield RowsBlock(str(file), first, values, read, columns)
            first, given = first + len(values), given + read
    except (arrow.ArrowException, OSError) as error:
        said = system_words(error) if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise DataError(f"{file} is no {kind.capitalize()} file that can be read ({said}); copy it again.") from None


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that ``datasets`` saved to disk, in order.

    Raises:
        DataError: it is no such folder, or one of several splits.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = read_object(folder / "dataset_dict.json")["splits"]
            one = f", such as {folder / splits[0]}" if splits else ""
            raise DataError(f"{folder} holds the splits {', '.join(splits)}; set `path` to one of them{one}.")
        state = read_object(folder / "state.json")
        return [inside(folder, each["filename"]) for each in state["_data_files"]]
    except DataError:
        raise
    except (OSError, KeyError, TypeError, ValueError):
        raise DataError(
            f"{folder} is no folder that the library datasets saved to disk (its state.json is missing or damaged); "
            "save it with save_to_disk, or set `source` to what the folder holds."
        ) from None


def _of_parquet(file: Path, column: str, beside: Sequence[str]) -> Iterator[tuple[dict[str, list[Any]], float]]:
    """(values of some rows by column, share of the file that was read by then)."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file, page_checksum_verification=True) as table:
        columns = _columns(file, column, beside, table.schema_arrow.names)
        rows, done = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
            done += batch.num_rows
            yield {name: _checked(batch.column(name)).to_pylist() for name in columns}, done / rows


def _of_arrow(file: Path, column: str, beside: Sequence[str]) -> Iterator[tuple[dict[str, list[Any]], float]]:
    import pyarrow as arrow

    with arrow.memory_map(str(file)) as mapped, arrow.ipc.open_stream(mapped) as stream:
        columns = _columns(file, column, beside, stream.schema.names)
        for batch in stream:
            held = {name: _checked(batch.column(name)) for name in columns}
            for start in range(0, batch.num_rows, _ROWS):
                parts = {name: each.slice(start, _ROWS).to_pylist() for name, each in held.items()}
                yield parts, mapped.tell() / max(mapped.size(), 1)


def _checked(values: Any) -> Any:
    """A column as it is: offsets that lead out of it would read other memory, and only this looks at them."""
    values.validate(full=True)
    return values


def _columns(file: Path, column: str, beside: Sequence[str], names: list[str]) -> list[str]:
    """Returns the columns to read."""
    if column not in names:
        raise DataError(f"{file} has no column {column!r}, but {', '.join(names)}; set `field` to one of them.")
    return [column, *(name for name in beside if name in names)]


def _package() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise VersionError("Parquet and Arrow files need the package pyarrow: pip install 'distca[data]'.") from None
    return pyarrow
