"""Declared fields: the type, range and default of a key of a JSON file, or of a caller's setting.

A dataclass declares them by its annotations::

    hidden_size: Width = 4096            # an int in that range
    head_dim: HeadSize | None = None     # or null
    mlp_bias: only(False) = False        # any other value is an unsupported feature

`read_fields` makes one from a JSON object. `check_fields` checks one that a caller made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
NUM_NAMED, MAX_ERROR = 20, 5000  # errors, keys or tensors that a message lists; its characters
_REPR = Repr()
_REPR.maxlevel = 3  # of nesting: repr itself recurses
_REPR.maxstring = _REPR.maxother = 100


@dataclass(frozen=True, eq=False)  # typing takes equal annotations for one: only(1) for only(True)
class Rule:
    """Values of a field; others are wrong, or features that are not supported."""

    holds: Callable[[Any], bool]
    expected: str
    is_unsupported: bool = False


def only(*known: Any) -> Any:
    """Annotation of a field with only these values; another raises NotImplementedError."""

    def holds(value: Any) -> bool:  # True is not 1
        return any(isinstance(value, bool) == isinstance(k, bool) and value == k for k in known)

    return Annotated[Any, Rule(holds, f"supported is {' or '.join(map(repr, known))}", True)]


def ints(low: int, high: int, multiple: int = 1) -> Any:
    """Annotation of an int in low..high."""

    def holds(value: Any) -> bool:
        is_int = isinstance(value, Integral) and not isinstance(value, bool)
        return is_int and low <= value <= high and value % multiple == 0

    of = f", a multiple of {multiple}," if multiple > 1 else ""
    return Annotated[int, Rule(holds, f"expected an int{of} in {low}..{high}")]


def floats(low: float, high: float, is_open: bool = False) -> Any:
    """Annotation of a number in low..high; ``is_open``: without low."""

    def holds(value: Any) -> bool:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return is_number and low <= value <= high and not (is_open and value == low)

    wanted = f"above {low} and at most {high}" if is_open else f"in {low}..{high}"
    return Annotated[float, Rule(holds, f"expected a number {wanted}")]


MAX_INT32 = 2**31 - 1
Flag = bool
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
Share = floats(0, 1, is_open=True)
Positive = floats(1e-6, 1e6)
NotNegative = floats(0, 1e6)


def read_fields(cls: type[T], data: Any, name: str = "") -> T:
    """An instance of a dataclass from a JSON object; keys that it does not declare are left out.

    Args:
        name: of the object in its file; "" = it is the file.

    Raises:
        ValueError: naming every key that is missing or of another type or range.
        NotImplementedError: naming every key whose value is not supported.
    """
    problems: list[_Problem] = []
    value = _read_object(cls, checked(dict, name, data), name, problems)
    _raise(problems)
    return value


def check_fields(config: Any) -> None:
    """Check a dataclass in its ``__post_init__``; raises as `read_fields`.

    Lists become tuples, and other numbers, such as numpy's, ints and floats.
    """
    problems: list[_Problem] = []
    hints = _hints(type(config)).items()
    values = {name: _read(hint, getattr(config, name), name, problems) for name, hint in hints}
    _raise(problems)
    for name, value in values.items():
        object.__setattr__(config, name, value)  # it may be frozen


class _Problem(NamedTuple):
    path: str
    expected: str
    got: str
    is_unsupported: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.expected}, got {self.got}"


def _raise(problems: list[_Problem]) -> None:
    if wrong := [problem for problem in problems if not problem.is_unsupported]:
        raise ValueError("; ".join(map(str, wrong[:NUM_NAMED])))
    if problems:
        raise NotImplementedError("; ".join(map(str, problems[:NUM_NAMED])))


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
    """A value converted to its annotation; one that does not fit adds to ``problems``."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _read_one_of(inner, value, path, problems)
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_read(inner[0], v, f"{path}[{i}]", problems) for i, v in enumerate(value))
    if kind is dict and isinstance(value, dict):
        return {key: _read(inner[1], v, f"{path}.{key}", problems) for key, v in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        return _read_object(hint, value, path, problems)
    rule = _rule(hint)
    if not rule.holds(value):
        problems.append(_Problem(path, rule.expected, shown(value), rule.is_unsupported))
    elif isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _rule(hint: Any) -> Rule:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return hint.__metadata__[0]
    if kind is Literal:
        texts = " or ".join(map(repr, inner))
        return Rule(lambda value: isinstance(value, str) and value in inner, f"expected {texts}")
    words = {str: "a text", tuple: "a list", bool: "True or False"}.get(kind, "an object")
    return Rule(lambda value: kind is Any or isinstance(value, kind), f"expected {words}")


def _read_one_of(hints: tuple[Any, ...], value: Any, path: str, problems: list[_Problem]) -> Any:
    """As `_read`, of several types; where none fits, errors inside the value tell most."""
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
    rule = _rule(kind)
    if not rule.holds(value):
        raise ValueError(f"{name}: {rule.expected}, got {shown(value)}")
    return value


def read_object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within another, empty where there is none or null; raises as `checked`."""
    value = data.get(key)
    return {} if value is None else checked(dict, key, value)


def shown(value: Any) -> str:
    """``repr`` of a bounded length and depth."""
    try:
        return _REPR.repr(value)
    except ValueError:  # of an int that Python does not write out
        if isinstance(value, int):
            return f"an int of {value.bit_length()} bits"
        return f"{type(value).__name__} that cannot be printed"


def one_line(error: object) -> str:
    """Text of an error in one line of a bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        raise kind(f"{one_line(error)}, in {str(file)!r}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}
