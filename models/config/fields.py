"""Declared fields: the type, the range and the default of what a JSON file says or a caller sets.

A dataclass declares them by its annotations, checked nowhere else::

    hidden_size: Width = 4096            # an int of that range
    head_dim: HeadSize | None = None     # null too
    mlp_bias: only(False) = False        # anything else is a feature that is not supported

`read_fields` makes one of a JSON object; `check_fields` holds one that a caller made against its
annotations. Errors name the field, what was expected and what was got.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_REPR = Repr()
_REPR.maxlevel = 3  # of nesting: repr itself recurses
_REPR.maxstring = _REPR.maxother = 100


@dataclass(frozen=True)
class Range:
    """Numbers in low..high, or above low where ``open``; ints are multiples of ``multiple``."""

    low: float
    high: float
    open: bool = False
    multiple: int = 1

    def holds(self, value: Any) -> bool:
        """Whether a number, which may be NaN or an int of any size, is one of these."""
        return self.low <= value <= self.high and (self.multiple == 1 or not value % self.multiple)


@dataclass(
    frozen=True, eq=False
)  # typing takes annotations that are equal for one: only(1) would be only(True)
class _Only:
    known: tuple[Any, ...]


def only(*known: Any) -> Any:
    """The annotation of a field of which only these values are supported.

    Another is a NotImplementedError.
    """
    return Annotated[Any, _Only(known)]


MAX_INT32 = 2**31 - 1
Width = Annotated[int, Range(1, 2**20)]  # channels
WidthOrNone = Annotated[int, Range(0, 2**20)]  # 0 = the model has no such thing
HeadSize = Annotated[int, Range(2, 2**14, multiple=2)]  # rotary embeddings rotate pairs
NumHeads = Annotated[int, Range(1, 2**14)]
NumLayers = Annotated[int, Range(1, 1024)]
NumShared = Annotated[int, Range(0, 1024)]  # layers that are of a kind, or none
NumExperts = Annotated[int, Range(1, 2**14)]
VocabSize = Annotated[int, Range(1, 2**24)]
NumTokens = Annotated[int, Range(1, MAX_INT32)]  # lengths are int32 in kernels
TokenId = Annotated[int, Range(0, MAX_INT32)]
TokenIds = TokenId | tuple[TokenId, ...] | None
# Wide enough for whatever a model may want, and narrow enough for fp32 to compute with.
Epsilon = Annotated[float, Range(1e-30, 1)]
Theta = Annotated[float, Range(2, 1e18)]
Factor = Annotated[float, Range(1, 1e9)]
Share = Annotated[float, Range(1e-6, 1)]
Positive = Annotated[float, Range(1e-6, 1e6)]
NotNegative = Annotated[float, Range(0, 1e6)]


def read_fields(cls: type[T], data: Any, name: str = "") -> T:
    """An instance of a dataclass from a JSON object.

    Keys that it does not declare are left out, absent ones have its defaults.

    Args:
        name: of the object in its file; "" = it is the file.

    Raises:
        ValueError: naming the first key that is missing or of another type or range.
        NotImplementedError: naming every key whose value is not supported.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{name}: expected an object, got {shown(data)}")
    values, unsupported = {}, []
    for field, (hint, default) in _declared(cls).items():
        key = f"{name}.{field}" if name else field
        if field not in data and default is MISSING:
            raise ValueError(f"{key}: expected {_expected(hint)}, got nothing")
        try:
            values[field] = checked(hint, key, data.get(field, default))
        except NotImplementedError as error:
            unsupported.append(str(error))
    if unsupported:
        raise NotImplementedError("; ".join(unsupported))
    return cls(**values)


def check_fields(config: Any) -> None:
    """Holds a dataclass against its annotations, in its ``__post_init__``; lists become tuples.

    Raises as `read_fields`.
    """
    for field, (hint, _) in _declared(type(config)).items():
        object.__setattr__(config, field, checked(hint, field, getattr(config, field)))


def checked(hint: Any, name: str, value: Any, whole: Any = None) -> Any:
    """``value`` as the annotation ``hint`` has it: lists become tuples, and objects dataclasses.

    Raises as `read_fields`.

    Args:
        whole: the annotation that errors name, if that is not ``hint``.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [arg for arg in args if arg is not type(None)]
        listed = [kind for kind in kinds if (get_origin(kind) is tuple) == _is_list(value)]
        return checked((listed or kinds)[0], name, value, hint)
    if origin is tuple and _is_list(value):
        return tuple(checked(args[0], f"{name}[{i}]", entry) for i, entry in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {key: checked(args[1], f"{name}.{key}", entry) for key, entry in value.items()}
    if is_dataclass(hint) and not isinstance(value, hint):
        return read_fields(hint, value, name)
    rule = hint.__metadata__[0] if origin is Annotated else None
    if isinstance(rule, _Only) and not _among(value, rule.known):
        known = " or ".join(map(repr, rule.known))
        raise NotImplementedError(f"{name}: supported is {known}, got {shown(value)}")
    if not _fits(hint, rule, value):
        raise ValueError(f"{name}: expected {_expected(whole or hint)}, got {shown(value)}")
    return value


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
def _declared(cls: type) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of every field."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in fields(cls)}


def _fits(hint: Any, rule: Any, value: Any) -> bool:
    """Whether a value that is no list and no object is what ``hint`` says."""
    origin = get_origin(hint)
    if origin is Literal:
        return _among(value, get_args(hint))
    if isinstance(rule, Range):
        kind = Integral if hint.__origin__ is int else Real
        return isinstance(value, kind) and not isinstance(value, bool) and rule.holds(value)
    if origin in (tuple, dict):
        return False
    return hint is Any or isinstance(rule, _Only) or isinstance(value, hint)


def _among(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether a value is one of these; True is not 1."""
    return any(
        isinstance(value, bool) == isinstance(one, bool)
        and isinstance(value, type(one) if not isinstance(one, Real) else Real)
        and value == one
        for one in known
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _expected(hint: Any) -> str:
    """An annotation in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_expected, args))
    if origin is Literal:
        return f"one of {args}"
    if origin is tuple:
        return f"a list of {_expected(args[0])}"
    rule = hint.__metadata__[0] if origin is Annotated else None
    if isinstance(rule, Range):
        kind = "an int" if hint.__origin__ is int else "a number"
        multiple = f", a multiple of {rule.multiple}," if rule.multiple > 1 else ""
        return f"{kind}{multiple} in {rule.low}..{rule.high}"
    if origin is dict or is_dataclass(hint):
        return "an object"
    return {bool: "True or False", str: "a text", type(None): "None"}.get(hint, "a value")
