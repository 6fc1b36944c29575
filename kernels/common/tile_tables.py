"""Tables of tile shapes: the file ``tiles.json`` beside each operator, and the look-up of an entry.

Tile shapes for another GPU: ``python -m bench.tune --write tuned`` on that GPU compiles the shapes
that may fit, times them on the named model shapes and writes ``tuned/<operator>/tiles.json``, with
new entries for the GPU's class alone (``Arch.tiles``). ``python -m bench.static --arch``
then says whether they hold on the other GPUs of that class. Copy a file over
``kernels/<operator>/tiles.json`` of the installed package, or let ``bench.tune --write`` do that,
and start Python again: a process reads each table once. An entry can also be edited by hand; a
mistake raises ValueError with the file and the entry. A shape changes speed, never which values are
computed.

A file is ``{"comments": [text], "entries": [entry]}``, one entry a line. The fields of an entry are
those of `Key`, of which a missing one stands for any value (a missing "gpu" for those that no other
entry names), those of the operator's dataclass of
launch choices, of which a missing one has its default, and "comment". ``block_m`` is ``rows`` where
it is missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from .arch import Arch, Tiles
from .tile_shapes import MAX_ROWS

C = TypeVar("C")
DTYPES = {2: "16-bit", 4: "fp32"}
POWERS_OF_TWO = ("head_dim", "rows", "block_m", "block_n", "num_warps")


@dataclass(frozen=True)
class Key:
    """What an entry is for; None: any value.

    Attributes:
        gpu: class of GPUs, of ``Arch.tiles``.
        dtype: of the queries and the new K/V.
        pages: what the pages hold: fp8 with scales, or values of ``dtype``.
        phase: of the batch.
        head_dim: the greatest that the entry is for; the entry of the smallest one that is enough
            is taken.
        rows: query rows of a tile that the entry is for, or more if no entry is for those.
    """

    gpu: Tiles | None = None
    dtype: Literal["16-bit", "fp32"] | None = None
    pages: Literal["same", "fp8"] | None = None
    phase: Literal["prefill", "decode"] | None = None
    head_dim: int | None = None
    rows: int | None = None

    def answers(self, question: Key) -> bool:
        """Whether an entry of this key may be taken for what is asked."""
        for name in ("gpu", "dtype", "pages", "phase"):
            if getattr(self, name) not in (None, getattr(question, name)):
                return False
        enough = self.head_dim is None or self.head_dim >= (question.head_dim or 0)
        return enough and (self.rows is None or self.rows <= (question.rows or MAX_ROWS))


@dataclass(frozen=True)
class Entry(Generic[C]):
    """One line of a table: the launch choices ``config`` of a key, and why, where that matters."""

    key: Key
    config: C
    comment: str | None = None


class TileTable(Generic[C]):
    """The table in a file, which is read at the first look-up.

    Attributes:
        path: of the file.
        config: the operator's dataclass of launch choices; it has a field ``block_m``.
    """

    def __init__(self, path: Path, config: type[C]) -> None:
        self.path, self.config = path, config
        self._found: dict[Key, Entry[C]] = {}

    @cached_property
    def contents(self) -> tuple[list[str], list[Entry[C]]]:
        """The comments and the entries of the file."""
        return parse(self.path.read_text(encoding="utf-8"), self.config, str(self.path))

    def find(self, question: Key) -> Entry[C]:
        """The entry of the smallest head_dim that is enough and the most rows up to those asked.

        Of two such entries that which names the GPU.

        Raises:
            LookupError: no entry is for that.
        """
        if question not in self._found:
            entries = [entry for entry in self.contents[1] if entry.key.answers(question)]
            if not entries:
                raise LookupError(f"{self.path}: expected an entry for {question}, got none")
            self._found[question] = min(
                entries,
                key=lambda e: (
                    e.key.head_dim or sys.maxsize,
                    -(e.key.rows or 0),
                    e.key.gpu is None,
                ),
            )
        return self._found[question]

    def select(
        self,
        arch: Arch,
        *,
        dtype_bytes: int,
        head_dim: int,
        fp8: bool = False,
        phase: str | None = None,
        rows: int | None = None,
    ) -> C:
        """The launch choices for an architecture.

        Args:
            arch: of the GPU.
            dtype_bytes: of a query value, 2 or 4.
            head_dim: of the keys.
            fp8: whether the pages hold fp8 values.
            phase: "prefill" or "decode"; None where the operator makes no difference.
            rows: query rows of a tile, at most; None: as many as there are.

        Raises:
            LookupError: no entry is for that.
        """
        pages: Any = "fp8" if fp8 else "same"
        dtype: Any = DTYPES[dtype_bytes]
        some_phase: Any = phase
        return self.find(Key(arch.tiles, dtype, pages, some_phase, head_dim, rows)).config

    def with_configs(self, configs: dict[Key, C]) -> str:
        """The text of the file with other launch choices in the entries of some keys.

        An entry that changes loses its comment, which explains the choices that it had.

        Raises:
            LookupError: no entry has one of the keys.
        """
        comments, entries = self.contents
        if missing := configs.keys() - {entry.key for entry in entries}:
            raise LookupError(
                f"{self.path}: expected an entry of the key {missing.pop()}, got none"
            )
        changed = [
            replace(entry, config=configs[entry.key], comment=None)
            if configs.get(entry.key, entry.config) != entry.config
            else entry
            for entry in entries
        ]
        return dump(comments, changed)


def parse(text: str, config: type[C], name: str) -> tuple[list[str], list[Entry[C]]]:
    """The comments and entries of a table.

    Args:
        text: of the file.
        config: dataclass of launch choices.
        name: of the file, for messages.

    Raises:
        ValueError: naming the file, the entry, and what is wrong with it.
    """
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: expected JSON: {error}") from None
    if not isinstance(table, dict) or set(table) != {"comments", "entries"}:
        raise ValueError(f'{name}: expected an object of "comments" and "entries"')
    entries: list[Entry[C]] = []
    for number, row in enumerate(table["entries"], 1):
        try:
            entries.append(_entry(row, config))
        except ValueError as error:
            raise ValueError(f"{name}: entry {number}, {json.dumps(row)}: {error}") from None
    numbers: dict[tuple[Any, ...], int] = {}
    for number, entry in enumerate(entries, 1):
        for question in _questions(entry.key):
            if (other := numbers.setdefault(question, number)) != number:
                raise ValueError(
                    f"{name}: entry {number}: expected another key than entry {other} has"
                )
    return table["comments"], entries


def _entry(row: Any, config: type[C]) -> Entry[C]:
    if not isinstance(row, dict):
        raise ValueError("expected an object")
    row = dict(row)
    if not isinstance(comment := row.pop("comment", None), str | None):
        raise ValueError(f"comment: expected a text, got {comment!r}")
    key = Key(**_values(Key, row))
    if key.rows is not None:
        row.setdefault("block_m", key.rows)
    entry = Entry(key, config(**_values(config, row)), comment)
    if row:
        raise ValueError(f"{next(iter(row))}: expected no such field")
    return entry


def _questions(key: Key) -> Iterator[tuple[Any, ...]]:
    """Everything that a key is for; its head_dim and rows as they are, and its GPU: an entry that
    names one comes before one that names none."""
    some = [
        [value] if value is not None or name == "gpu" or not _choices(hint) else _choices(hint)
        for (name, value), hint in zip(vars(key).items(), _hints(Key).values(), strict=True)
    ]
    return product(*some)


def _values(cls: Any, row: dict[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, which are taken out of ``row``."""
    hints, values = _hints(cls), {}
    for field in fields(cls):
        if field.name in row:
            values[field.name] = row.pop(field.name)
            _check(field.name, values[field.name], hints[field.name], field.default)
        elif field.default is MISSING:
            raise ValueError(f"{field.name}: expected a value, got none")
    return values


_hints = cache(get_type_hints)


def _type(hint: Any) -> Any:
    """Of ``X | None`` the X."""
    return hint if get_origin(hint) is Literal else (get_args(hint) or (hint,))[0]


def _choices(hint: Any) -> Sequence[str]:
    return get_args(_type(hint))


def _check(name: str, value: Any, hint: Any, default: Any) -> None:
    """Require one of the choices, a bool, or an int: at least 1, or 0 if that is the default."""
    kind, least = _type(hint), 0 if default == 0 else 1
    if choices := _choices(hint):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    elif type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
    elif name in POWERS_OF_TWO and (value < 1 or value & (value - 1)):
        raise ValueError(f"{name}: expected a power of two, got {value}")
    elif kind is int and value < least:
        raise ValueError(f"{name}: expected {least} or more, got {value}")


def dump(comments: Sequence[str], entries: Sequence[Entry[Any]]) -> str:
    """The text of a table, one entry a line; ``parse`` is its inverse."""
    rows = []
    for entry in entries:
        row = {name: value for name, value in vars(entry.key).items() if value is not None}
        for field in fields(entry.config):
            value = getattr(entry.config, field.name)
            derived = field.name == "block_m" and value == entry.key.rows
            if value != field.default and not derived:
                row[field.name] = value
        if entry.comment is not None:
            row["comment"] = entry.comment
        rows.append(json.dumps(row, ensure_ascii=False))
    texts = [json.dumps(comment, ensure_ascii=False) for comment in comments]

    def block(lines: list[str]) -> str:
        return "[\n" + ",\n".join(lines) + "\n]"

    return f'{{\n"comments": {block(texts)},\n"entries": {block(rows)}\n}}\n'
