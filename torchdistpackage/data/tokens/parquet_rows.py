"""Rows of parquet files as the objects that JSON lines would hold. No torch.

Arrow gives every struct of a column the keys of all its structs, so null in a struct is a key that
the row lacks. In a map and in a list null is a value.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdistpackage.bounded import parse_json
from torchdistpackage.errors import DataError

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Schema
    from pyarrow.parquet import ParquetFile

ROWS_AT_ONCE = 512
"""Rows that are in memory at once."""

Plain = Callable[[Any], Any]
"""Converts a value of Arrow to what JSON would give."""


@contextmanager
def parquet_file(path: Path) -> "Iterator[ParquetFile]":
    """Open a parquet file; raises DataError if pyarrow is missing or the file cannot be read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"data.name=parquet needs pyarrow, which cannot be imported ({error}); "
            'pip install "torchdistpackage[parquet]", or write JSON lines'
        ) from error
    try:
        with ParquetFile(path) as file:
            yield file
    except (OSError, ArrowException) as error:
        raise DataError(
            f"cannot read {path} as parquet: {error}; write the file again, or correct data.name"
        ) from error


def parquet_rows(
    file: "ParquetFile", groups: list[int], names: list[str]
) -> Iterator[dict[str, Any] | ValueError]:
    """Yield these columns of the rows of row groups, see `plain_rows`."""
    batches = file.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=names)
    return plain_rows(file.schema_arrow, batches, names)


def plain_rows(
    schema: "Schema", batches: "Iterable[RecordBatch]", names: list[str]
) -> Iterator[dict[str, Any] | ValueError]:
    """Yield these columns of the rows of batches; a row with invalid JSON comes as its error."""
    makers = {
        field.name: make
        for field in schema
        if field.name in names and (make := _plain(field.type)) is not None
    }
    parts = (
        batch.slice(first, ROWS_AT_ONCE)
        for batch in batches
        for first in range(0, batch.num_rows, ROWS_AT_ONCE)
    )
    for batch in parts:
        for row in batch.select(names).to_pylist():
            try:
                for name, make in makers.items():
                    row[name] = make(row[name])
            except ValueError as error:
                yield error
            else:
                yield row


def _plain(kind: "DataType") -> Plain | None:
    """Return the function that converts values of this type; None: they need no change."""
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):  # `datasets` keeps values of mixed types as arrow.json
        is_json = kind.extension_name == "arrow.json"
        return _unless_null(parse_json) if is_json else _plain(kind.storage_type)
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        fields = [(field.name, _plain(field.type) or _same) for field in kind.fields]
        return _unless_null(
            lambda value: {name: x for name, make in fields if (x := make(value[name])) is not None}
        )
    if types.is_map(kind):
        of_item = _plain(kind.item_type) or _same
        return _unless_null(lambda value: {key: of_item(x) for key, x in value})
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # lists of every kind
        of_value = _plain(kind.value_type)
        if of_value is not None:
            return _unless_null(lambda value: [of_value(x) for x in value])
    return None


def _same(value: Any) -> Any:
    return value


def _unless_null(make: Plain) -> Plain:
    return lambda value: None if value is None else make(value)
