"""A jinja sandbox whose templates end.

Each operation is paid for before it is done, out of a budget of characters, and within a time.

A template is a program of whoever made the checkpoint. What it can repeat is the body of a loop and
a call of a macro; what it can make large is the result of an operator, a method or a filter. Each
of these is charged by the size of its arguments, in proportion to what it can make of them: known
ones as much as they take, all others the product of all sizes (numbers count as themselves), which
no result exceeds but by a constant (`urlencode` makes up to 12 characters of one). A list that
holds one long text a thousand times is as large as its text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import prod
from time import thread_time
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEP, ELEMENT, LEVEL = (
    100,
    16,
    4,
)  # characters that an operation, an element, and a level of nesting of it cost
_NUMBER = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")  # a field of a format whose width is an argument
_DATA = (str, bytes, int, float, list, tuple, dict, set, frozenset, range)
# What takes no longer than its text or list, and makes no more of it.
_FILTERS = frozenset(
    [
        "abs",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "trim",
        "upper",
        "capitalize",
        "title",
    ]
)
_METHODS = frozenset(
    [
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "splitlines",
        "startswith",
        "endswith",
        "upper",
        "lower",
        "title",
        "capitalize",
        "casefold",
        "swapcase",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "partition",
        "rpartition",
        "removeprefix",
        "removesuffix",
        "items",
        "keys",
        "values",
        "get",
        "copy",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
    ]
)
_SQUARED = frozenset(("sum", "urlize", "wordwrap"))  # slow in long texts


class TooMuch(Exception):
    """A template that takes more than its budget."""


class Budget:
    """What a rendering may spend.

    Args:
        characters: to spend.
        seconds: of CPU to spend them in, by the thread that makes it.
    """

    def __init__(self, characters: int, seconds: float) -> None:
        self._limits = characters, seconds
        self._left, self._until = characters, thread_time() + seconds

    def spend(self, characters: int) -> None:
        """Raises TooMuch where they are not left, or the time is over."""
        self._left -= characters
        if self._left < 0 or thread_time() > self._until:
            most, seconds = self._limits
            raise TooMuch(
                f"it takes more than {most} characters' work or {seconds} seconds of CPU: an "
                "endless loop?"
            )

    def deep(self, value: Any) -> int:
        """Characters of a value that is written out, which are spent on measuring it."""
        total, stack = 0, [(value, 1)]
        while stack:
            item, level = stack.pop()
            if isinstance(item, Namespace):
                item = item._Namespace__attrs
            inner: Iterable[Any] = ()
            if isinstance(item, str | bytes):
                size = len(item)
            elif isinstance(item, dict):
                inner, size = [*item.keys(), *item.values()], 2 * len(item)
            elif isinstance(item, list | tuple | set | frozenset | range):
                inner, size = item, len(item)
            else:
                size = item.bit_length() // 3 if isinstance(item, int) else 2 * ELEMENT
            cost = size + ELEMENT + LEVEL * level
            self.spend(cost)
            total += cost
            stack.extend((each, level + 1) for each in inner)
        return total

    def size(self, value: Any) -> int:
        """What an argument multiplies a result by at most."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return abs(value)
        if isinstance(value, tuple):
            return sum(map(self.size, value))
        return self.deep(value)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates with `compile_bounded`, and renders them within `budget`.

    Threads may share it.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, **options: Any) -> None:
        # Nothing is computed at compile time, which nobody counts.
        super().__init__(optimized=False, finalize=self._written, **options)
        del self.globals["lipsum"]
        self._running = threading.local()
        self._constants = 0
        for name in list(self.filters):
            self.add_filter(name, self.filters[name])
        # Of `_Counted`.
        self.filters["_items"] = self._items
        self.filters["_text"] = self._text
        self.filters["_part"] = self._part

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """A filter that is paid for."""

        @wraps(work)
        def paid(*args: Any, **more: Any) -> Any:
            first = int(hasattr(work, "jinja_pass_arg"))
            if isinstance(args[first], Iterator):
                args = (*args[:first], list(self._items(args[first])), *args[first + 1 :])
            values = [*args[first:], *more.values()]
            if name in _FILTERS:
                self.spent.spend(STEP + _length(values[0]))
            elif name == "replace" and all(isinstance(v, str) for v in values[:3]):
                self.spent.spend(STEP + _replaced(*values[:3]))
            elif name == "format":
                form, *rest = values
                self.spent.spend(STEP + self._format_cost(form, tuple(rest), "*" in str(form)))
            else:
                cost = prod(1 + self.spent.size(value) for value in values)
                self.spent.spend(STEP + cost ** (2 if name in _SQUARED else 1))
            return work(*args, **more)

        self.filters[name] = paid

    def compile_bounded(self, source: str) -> Any:
        """The template of a source."""
        tree = self.parse(source)
        self._constants = sum(len(data.data) for data in tree.find_all(nodes.TemplateData))
        return self.from_string(_Counted().visit(tree))

    @contextmanager
    def budget(self, characters: int, seconds: float) -> Iterator[Budget]:
        """What templates that this thread renders meanwhile may take together."""
        before = getattr(self._running, "budget", None)
        self._running.budget = Budget(characters, seconds)
        try:
            yield self._running.budget
        finally:
            self._running.budget = before

    @property
    def spent(self) -> Budget:
        """The budget of this thread."""
        return self._running.budget

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Pays for the result of an operator, then computes it."""
        bits = [v.bit_length() if isinstance(v, int) else 0 for v in (left, right)]
        if operator == "%" and isinstance(left, str | bytes):
            cost = self._format_cost(left, (right,), "*" in str(left))
        elif operator == "**":
            cost = (bits[0] * abs(right)) ** 2 // 1024 if all(bits) else 0
        elif all(bits):
            cost = (1 + bits[0] // 32) * (1 + bits[1] // 32)
        elif operator == "*" and any(bits):
            cost = _length(left) * abs(right) if bits[1] else _length(right) * abs(left)
        else:
            cost = _length(left) + _length(right)
        self.spent.spend(STEP + cost)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **more: Any) -> Any:
        """Pays for a call, then does it."""
        name, of = getattr(__obj, "__name__", ""), getattr(__obj, "__wrapped__", __obj)
        owner, spend = getattr(of, "__self__", None), __self.spent.spend
        values = (*args, *more.values())
        if isinstance(__obj, LoopContext):
            spend(STEP + __self._constants)
            args = (__self._items(args[0]), *args[1:])
        elif not isinstance(owner, _DATA):
            spend(
                STEP + __self._constants * (not isinstance(__obj, type)) + sum(map(_length, values))
            )
        elif name in _METHODS:
            spend(STEP + _length(owner) * isinstance(owner, str | list))
        elif name == "replace" and all(isinstance(v, str) for v in values[:2]):
            spend(STEP + _replaced(owner, *values[:2]))
        elif name in ("format", "format_map"):
            spend(STEP + __self._format_cost(owner, values, bool(_NESTED.search(owner))))
        else:
            spend(STEP + prod(1 + __self.spent.size(value) for value in (owner, *values)))
        return super().call(__context, __obj, *args, **more)

    def _format_cost(self, form: Any, values: tuple[Any, ...], nested: bool) -> int:
        """Of a format: its widths, and each value as often as the format may name it.

        Args:
            nested: whether values may be widths.
        """
        texts = [str(form)]
        sizes = [1 + self.spent.deep(value) for value in values]
        if nested:
            texts += [v for v in values if isinstance(v, str)]
            sizes += [1 + abs(v) for v in _flat(values) if isinstance(v, int)]
        widths = sum(int(n) if len(n) < 12 else 10**12 for t in texts for n in _NUMBER.findall(t))
        return len(texts[0]) + widths + (texts[0].count("{") + texts[0].count("%")) * sum(sizes)

    def _items(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.spent.spend(STEP + self._constants)
            yield value

    def _text(self, value: Any) -> Any:
        self.spent.deep(value)
        return value

    @pass_context  # so that constants are not written at compile time
    def _written(self, context: Any, value: Any) -> Any:
        return self._text(value)

    def _part(self, value: Any) -> Any:
        self.spent.spend(STEP + _length(value))
        return value


class _Counted(NodeTransformer):
    """Counts the items of loops, and the sizes of what has no hook of its own.

    Operands of ``~``, and slices.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_filtered(each, "_text") for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_part") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set | range) else 0


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple | dict):
            yield from _flat(value.values() if isinstance(value, dict) else value)
        else:
            yield value


def _replaced(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)
