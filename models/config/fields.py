"""Declared fields: the type, range and default of a key of a JSON file, or of a caller's setting.

A dataclass declares them by its annotations::

    hidden_size: Width = 4096            # an int in that range
    head_dim: HeadSize | None = None     # or null
    mlp_bias: only(False) = False        # any other value is an unsupported feature

`read_fields` makes one from a JSON object. `check_fields` checks one that a caller made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

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

    def holds(self, value: Any) -> bool:
        """True for a number in the range."""
        kind = Integral if self.is_int else Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high and (self.multiple == 1 or not value % self.multiple)

    def __str__(self) -> str:
        kind = "an int" if self.is_int else "a number"
        multiple = f", a multiple of {self.multiple}," if self.multiple > 1 else ""
        return f"expected {kind}{multiple} in {self.low}..{self.high}"


@dataclass(frozen=True, eq=False)  # typing takes equal annotations for one: only(1) for only(True)
class _Only:
    known: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        """True for a supported value; True is not 1."""
        return any(
            isinstance(value, bool) == isinstance(k, bool) and value == k for k in self.known
        )

    def __str__(self) -> str:
        return f"supported is {' or '.join(map(repr, self.known))}"


class _Flag:
    def holds(self, value: Any) -> bool:
        """True for a bool."""
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "expected True or False"


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
    """
    problems: list[_Problem] = []
    value = _read_object(cls, checked(dict, name, data), name, problems)
    if wrong := [problem for problem in problems if not problem.is_unsupported]:
        raise ValueError("; ".join(map(str, wrong[:NUM_NAMED])))
    if problems:
        raise NotImplementedError("; ".join(map(str, problems[:NUM_NAMED])))
    return value


class _Problem(NamedTuple):
    path: str
    expected: str
    got: str
    is_unsupported: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.expected}, got {self.got}"


def _read_object(cls: type, data: Mapping[str, Any], path: str, problems: list[_Problem]) -> Any:
    hints, given, num_before = _hints(cls), {}, len(problems)
    for field in fields(cls):
        at = f"{path}.{field.name}" if path else field.name
        if field.name in data:
            given[field.name] = _read(hints[field.name], data[field.name], at, problems)
        elif field.default is MISSING:
            problems.append(_Problem(at, "expected a value", "nothing"))
    return None if len(problems) > num_before else cls(**given)


def _read(hint: Any, value: Any, path: str, problems: list[_Problem]) -> Any:
    """A JSON value as its annotation wants it; adds to ``problems`` where it is none such."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _read_one_of(inner, value, path, problems)
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_read(inner[0], v, f"{path}[{i}]", problems) for i, v in enumerate(value))
    if kind is dict and isinstance(value, dict):
        return {key: _read(inner[1], v, f"{path}.{key}", problems) for key, v in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        return _read_object(hint, value, path, problems)
    if hint is Any or (hint is str and isinstance(value, str)):
        return value
    rule: Any = {str: "a text", tuple: "a list"}.get(kind or hint, "an object")
    expected, is_unsupported = f"expected {rule}", False
    if kind is Annotated:
        rule = hint.__metadata__[0]
        if rule.holds(value):
            return value
        expected, is_unsupported = str(rule), isinstance(rule, _Only)
    elif kind is Literal:
        if isinstance(value, str) and value in inner:
            return value
        expected = f"expected {' or '.join(map(repr, inner))}"
    problems.append(_Problem(path, expected, shown(value), is_unsupported))
    return None


def _read_one_of(hints: tuple[Any, ...], value: Any, path: str, problems: list[_Problem]) -> Any:
    """A value that may have several types. Where none fits, errors inside it tell most."""
    if value is None and NoneType in hints:
        return None
    found: list[_Problem] = []
    for hint in hints:
        if hint is not NoneType:
            trial: list[_Problem] = []
            out = _read(hint, value, path, trial)
            if not trial:
                return out
            found += trial
    if inside := [problem for problem in found if problem.path != path]:
        problems += inside
        return None
    rest = (problem.expected.removeprefix("expected ") for problem in found[1:])
    problems.append(found[0]._replace(expected=" or ".join([found[0].expected, *rest])))
    return None


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
    """Check the numbers of a dataclass, in its ``__post_init__``, against their ranges.

    Raises:
        ValueError: naming the field, the range, and the value.
    """
    for name, (rule, has_none) in _ranges(type(config)).items():
        value = getattr(config, name)
        if value is None and has_none:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if not rule.holds(one):
                raise ValueError(f"{name}: {rule}, got {shown(value)}")


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
    """Add the file to what is said of its content."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        raise kind(f"{error}, in {str(file)!r}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def _ranges(cls: type) -> dict[str, tuple[Range, bool]]:
    """The range of a field, or of its elements where it is a tuple, and whether it may be None."""
    found = {}
    for field in fields(cls):
        hint = _hints(cls)[field.name]
        for part in (hint, *get_args(hint)):
            for rule in getattr(part, "__metadata__", ()):
                if isinstance(rule, Range):
                    found[field.name] = rule, type(None) in get_args(hint)
    return found
