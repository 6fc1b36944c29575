"""Declared fields: the type, range and default of what a JSON file says or a caller sets.

A dataclass declares them by its annotations::

    hidden_size: Width = 4096            # an int of that range
    head_dim: HeadSize | None = None     # null too
    mlp_bias: only(False) = False        # anything else is a feature that is not supported

`read_fields` makes one of a JSON object. It alone uses pydantic (extra "hf"), so that models with
built-in configurations do without; `check_fields` holds the numbers of one that a caller made
against their ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
NUM_NAMED = 20  # errors, keys or tensors that a message lists
_REPR = Repr()
_REPR.maxlevel = 3  # of nesting: repr itself recurses
_REPR.maxstring = _REPR.maxother = 100


@dataclass(frozen=True)
class Range:
    """Numbers in low..high; ints are multiples of ``multiple``."""

    low: float
    high: float
    multiple: int = 1
    is_int: bool = True

    def check(self, value: Any) -> Any:
        """The value; raises ValueError where it is none of these."""
        kind = Integral if self.is_int else Real
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"expected {self}")
        if not self.low <= value <= self.high or (self.multiple > 1 and value % self.multiple):
            raise ValueError(f"expected {self}")
        return value

    def __str__(self) -> str:
        kind = "an int" if self.is_int else "a number"
        multiple = f", a multiple of {self.multiple}," if self.multiple > 1 else ""
        return f"{kind}{multiple} in {self.low}..{self.high}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """See pydantic: custom types."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, eq=False)  # typing takes equal annotations for one: only(1) for only(True)
class _Only:
    known: tuple[Any, ...]

    def check(self, value: Any) -> Any:
        """The value; raises ValueError where it is not supported."""
        if not any(_same(value, one) for one in self.known):
            raise _Unsupported(f"supported is {' or '.join(map(repr, self.known))}")
        return value

    __get_pydantic_core_schema__ = Range.__get_pydantic_core_schema__


class _Unsupported(ValueError):
    pass


class _Flag:
    def check(self, value: Any) -> bool:
        """The value; raises ValueError where it is not a bool."""
        if not isinstance(value, bool):
            raise ValueError("expected True or False")
        return value

    __get_pydantic_core_schema__ = Range.__get_pydantic_core_schema__


def only(*known: Any) -> Any:
    """The annotation of a field of which only these values are supported.

    Another is a NotImplementedError.
    """
    return Annotated[Any, _Only(known)]


def ints(low: int, high: int, multiple: int = 1) -> Any:
    """The annotation of an int in low..high."""
    return Annotated[int, Range(low, high, multiple)]


def floats(low: float, high: float) -> Any:
    """The annotation of a number in low..high."""
    return Annotated[float, Range(low, high, is_int=False)]


MAX_INT32 = 2**31 - 1
Flag = Annotated[bool, _Flag()]
Width = ints(1, 2**20)  # channels
WidthOrNone = ints(0, 2**20)  # 0 = the model has no such thing
HeadSize = ints(2, 2**14, multiple=2)  # rotary embeddings rotate pairs
NumHeads = ints(1, 2**14)
NumLayers = ints(1, 1024)
NumShared = ints(0, 1024)  # layers that are of a kind, or none
NumExperts = ints(1, 2**14)
VocabSize = ints(1, 2**24)
NumTokens = ints(1, MAX_INT32)  # lengths are int32 in kernels
TokenId = ints(0, MAX_INT32)
TokenIds = TokenId | tuple[TokenId, ...] | None
# Wide enough for whatever a model may want, and narrow enough for fp32 to compute with.
Epsilon = floats(1e-30, 1)
Theta = floats(2, 1e18)
Factor = floats(1, 1e9)
Share = floats(1e-6, 1)
Positive = floats(1e-6, 1e6)
NotNegative = floats(0, 1e6)


def read_fields(cls: type[T], data: Any, name: str = "") -> T:
    """An instance of a dataclass from a JSON object.

    Keys that it does not declare are left out, absent ones have its defaults.

    Args:
        name: of the object in its file; "" = it is the file.

    Raises:
        ValueError: naming every key that is missing or of another type or range.
        NotImplementedError: naming every key whose value is not supported.
        ImportError: without pydantic (extra "hf").
    """
    adapter, data = _adapter(cls), checked(dict, name, data)
    try:
        return adapter.validate_python(data)
    except ValueError as error:  # pydantic's ValidationError
        wrong, unsupported = _by_kind(error, name)
        if wrong:
            raise ValueError("; ".join(wrong[:NUM_NAMED])) from None
        raise NotImplementedError("; ".join(unsupported[:NUM_NAMED])) from None


def checked(kind: type, name: str, value: Any) -> Any:
    """A JSON value of a kind, str or dict; raises ValueError naming it for any other."""
    if not isinstance(value, kind):
        words = "a text" if kind is str else "an object"
        raise ValueError(f"{name}: expected {words}, got {shown(value)}")
    return value


def read_object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within another, empty where there is none or null; raises as `checked`."""
    value = data.get(key)
    return {} if value is None else checked(dict, key, value)


def check_fields(config: Any) -> None:
    """Holds the numbers of a dataclass against their ranges, in its ``__post_init__``.

    Raises:
        ValueError: naming the field, what was expected and what was got.
    """
    for name, (rule, has_none) in _ranges(type(config)).items():
        value = getattr(config, name)
        if value is None and has_none:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            try:
                rule.check(one)
            except ValueError as error:
                raise ValueError(f"{name}: {error}, got {shown(value)}") from None


def shown(value: Any) -> str:
    """``repr`` of a bounded length and depth."""
    try:
        return _REPR.repr(value)
    except ValueError:  # of an int that Python does not write out
        if isinstance(value, int):
            return f"an int of {value.bit_length()} bits"
        return f"{type(value).__name__} that cannot be printed"


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Adds the file to what is said of its content."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        raise kind(f"{error}, in {str(file)!r}") from None


@cache
def _adapter(cls: type) -> Any:
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise ImportError(
            "Hugging Face directories need the package pydantic (pip install 'quire[hf]')"
        ) from error
    return TypeAdapter(cls)


@cache
def _ranges(cls: type) -> dict[str, tuple[Range, bool]]:
    """The range of a field, or of its elements where it is a tuple, and whether it may be None."""
    hints, found = get_type_hints(cls, include_extras=True), {}
    for field in fields(cls):
        hint = hints[field.name]
        for part in (hint, *get_args(hint)):
            for rule in getattr(part, "__metadata__", ()):
                if isinstance(rule, Range):
                    found[field.name] = rule, type(None) in get_args(hint)
    return found


# pydantic's words for what JSON has other words for.
_KINDS = {
    "missing": "a value", "dataclass_type": "an object", "dict_type": "an object",
    "tuple_type": "a list", "string_type": "a text",
}  # fmt: skip


def _by_kind(error: Any, name: str) -> tuple[list[str], list[str]]:
    """What pydantic says, key by key: of wrong values, and of unsupported ones.

    Of a value that may have several types it says why it is none of them. What it says of the
    innermost part counts: there the right type was tried.
    """
    found: dict[Any, list[tuple[int, str, str, str, bool]]] = {}
    for one in error.errors(include_url=False):
        # Which type was tried is no part of the key.
        keys = [key for key in one["loc"] if isinstance(key, int) or not _is_type(key)]
        parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
        said = one["msg"].replace("Input should be", "expected")
        if one["type"] in _KINDS:
            said = f"expected {_KINDS[one['type']]}"
        own = one.get("ctx", {}).get("error")
        found.setdefault(keys[0], []).append(
            (
                len(keys),
                (name + "".join(parts)).removeprefix("."),
                said if own is None else str(own),
                "nothing" if one["type"] == "missing" else shown(one["input"]),
                isinstance(own, _Unsupported),
            )
        )
    wrong, unsupported = [], []
    for all_of_key in found.values():
        innermost = max(depth for depth, *_ in all_of_key)
        paths: dict[tuple[str, str, bool], list[str]] = {}
        for depth, path, said, got, is_unsupported in all_of_key:
            if depth == innermost:
                paths.setdefault((path, got, is_unsupported), []).append(said)
        for (path, got, is_unsupported), said in paths.items():
            words = " or ".join([said[0], *(other.removeprefix("expected ") for other in said[1:])])
            (unsupported if is_unsupported else wrong).append(f"{path}: {words}, got {got}")
    return wrong, unsupported


def _is_type(key: str) -> bool:
    return key == "str" or "[" in key


def _same(value: Any, known: Any) -> bool:
    """Whether two values are equal; True is not 1."""
    return isinstance(value, bool) == isinstance(known, bool) and bool(value == known)
