"""Rows from JSONL files, Parquet files and Hugging Face data sets, one at a time."""

from __future__ import annotations

import codecs
import glob
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gcpo.data.columns import missing_column, read_row
from megatron_gcpo.data.records import BadRow, Item
from megatron_gcpo.names import nearest

if TYPE_CHECKING:
    from megatron_gcpo.config.records import SourceConfig


def read_jsonl(source: SourceConfig) -> Iterator[Item | BadRow]:
    """One JSON object per line, UTF-8; blank lines are not rows."""
    for path, name in _files(source, "jsonl"):
        try:
            with path.open("rb") as lines:
                for number, raw in enumerate(lines, start=1):
                    if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        raise ValueError(f"{path} is UTF-16, not UTF-8: convert it, e.g. iconv -f UTF-16 -t UTF-8")
                    text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                    if text.strip():
                        yield _json_row(text, f"{path}:{number}", f"{name}:{number}", source)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def read_parquet(source: SourceConfig) -> Iterator[Item | BadRow]:
    """Parquet through pyarrow, a batch of rows at a time; row numbers start with 1."""
    import pyarrow
    from pyarrow import parquet

    for path, name in _files(source, "parquet"):
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(file.schema_arrow.names, source, str(path))
                number = 0
                for batch in file.iter_batches(batch_size=1024):
                    for row in batch.to_pylist():
                        number += 1
                        yield read_row(row, f"{path}: row {number}", f"{name}:{number}", source)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"cannot read {path} as Parquet: {_first_line(error)}") from error


def read_hf(source: SourceConfig) -> Iterator[Item | BadRow]:
    """A Hugging Face data set: ``path`` a hub id, a folder of data files, or one that ``save_to_disk`` wrote.

    ``name`` picks the configuration, ``split`` the split; ``options`` go to ``datasets.load_dataset`` (revision,
    data_files, streaming, ...). Row numbers start with 1.
    """
    path = _wanted_path(source)
    datasets = _import_datasets()
    try:
        data = _load_hf(datasets, path, source)
    except Exception as error:  # a border: hub, network, cache, data files and user options all fail in their own ways
        raise ValueError(
            f"cannot load the data set {path} (name {source.name}, split {source.split}): {_first_line(error)}"
        ) from error
    if data.column_names is not None:  # a streamed set may not know them before its first row
        _check_columns(data.column_names, source, path)
    for number, row in enumerate(data, start=1):
        yield read_row(row, f"{path}: row {number}", f"{path}:{source.split}:{number}", source)


def _json_row(raw: bytes, where: str, default_id: str, source: SourceConfig) -> Item | BadRow:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        reason = f"not UTF-8 (byte 0x{byte:02x} at position {error.start + 1} of the line): convert the file to UTF-8"
        return BadRow(where=where, kind="malformed", reason=reason)
    except json.JSONDecodeError as error:
        reason = f"not valid JSON ({error.msg} at column {error.colno})"
        return BadRow(where=where, kind="malformed", reason=reason)
    except (RecursionError, ValueError) as error:  # too deep, or a number of too many digits
        return BadRow(where=where, kind="malformed", reason=f"not readable JSON ({_first_line(error)})")
    if not isinstance(row, dict):
        reason = "the line is not a JSON object; a JSONL file holds one object per line"
        return BadRow(where=where, kind="malformed", reason=reason)
    return read_row(row, where, default_id, source)


def _files(source: SourceConfig, kind: str) -> list[tuple[Path, str]]:
    """The files a path or glob names, sorted, each with the short name its row ids begin with."""
    pattern = os.path.expanduser(_wanted_path(source))
    path = Path(pattern)
    if path.is_file():
        return [(path, path.name)]
    if path.is_dir():
        raise ValueError(f"{pattern} is a folder: name a file or a glob in it, e.g. {pattern.rstrip('/')}/*.{kind}")
    if not glob.has_magic(pattern):
        if path.exists():
            raise ValueError(f"{pattern} is not a regular file")
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        hint = f"; did you mean {path.parent / near}?" if near else ""
        missing = "" if path.parent.is_dir() else f" (nor a folder {path.parent})"
        raise ValueError(f"there is no file {pattern}{missing}{hint}: correct path")
    found = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not found:
        raise ValueError(f"no file matches {pattern} (from {Path.cwd()}): correct path")
    # Ids must not change with the place the data lies in, nor collide between folders.
    common = Path(os.path.commonpath([p.parent for p in found]))
    return [(p, p.relative_to(common).as_posix()) for p in found]


def _wanted_path(source: SourceConfig) -> str:
    if source.path is None:
        raise ValueError(f"kind {source.kind} needs a path: set path")
    return source.path


def _check_columns(columns: list[str], source: SourceConfig, where: str) -> None:
    """A column that no row can have is an error at once, whatever ``on_bad_row`` says."""
    made = ("prompt_column", "answer_column", "demonstration_column") if source.layout else ()
    for field in ("prompt_column", "answer_column", "id_column", "demonstration_column"):
        if field in made:
            continue
        column = getattr(source, field)
        if column is not None and (reason := missing_column(columns, field, column)):
            raise ValueError(f"{where}: {reason}")


def _import_datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            "kind hf needs the package datasets, which cannot be imported: pip install datasets "
            f"(or convert the data to jsonl or parquet). {_first_line(error)}"
        ) from error


def _load_hf(datasets: Any, path: str, source: SourceConfig) -> Any:
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(folder))[source.split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(str(folder))
    where = str(folder) if folder.is_dir() else path
    return datasets.load_dataset(where, source.name, split=source.split, **source.options)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
