"""Tables of what each argument of a public function may be: refused by name, or right."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.helpers import DEVICE

RIGHT = "right"
IMPLS = ("torch", "triton")
# Implementations that look at values in memory.
CHECKED = IMPLS if DEVICE == "cpu" else ()
HUGE = (2**31 - 1, 2**31, 2**40)
F16, F64 = torch.float16, torch.float64
# Dimensions in which a tensor may be shorter: those of its own, and numbers of rows without more.
FREE = {
    "workspace 0", "block_table 1", "window_table 1", "compressed_table 1", "topk_indices 1",
    "indices 2", "extra_indices_in_kvcache 2", "ids 1", "pages 0", "pages 1", "k_cache 1",
    "extra_k_cache 0", "extra_k_cache 1", "state 0", "state 1", "table 0", "cos_sin 0", "qkv 1",
    "streams 0", "logits 0",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of one argument.

    name: the argument. value: its value, or a function of all other arguments that returns it, or
    several by name. outcome: RIGHT, or the error; its message starts with the name of the argument
    or with ``blamed``; () stands for any argument and error. impls: the implementations that can tell.
    """

    name: str
    value: Any
    outcome: Any = ValueError
    blamed: str | tuple[()] | None = None
    impls: tuple[str, ...] = IMPLS

    def __str__(self):
        if callable(self.value) and self.value.__name__ == "<lambda>":
            source = inspect.getsource(self.value).split("lambda", 1)[-1]
            return f"{self.name}={' '.join(source.split())[:50]}"
        value = getattr(self.value, "__name__", None) or repr(self.value)
        return f"{self.name}={value}"[:50]

    def applied(self, arguments):
        """The arguments with this one changed."""
        value = self.value(arguments) if callable(self.value) else self.value
        return arguments | (value if isinstance(value, dict) else {self.name: value})


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of one function.

    Attributes:
        function: operator.
        arguments: makes the arguments of a right call.
        rows: what is told of single arguments, besides ``tensors``.
        check: call of (function, arguments, impl) that requires a right result.
        written, any_stride: see ``tensors``.
        generic: False if another table has the function's ``tensors``.
    """

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    rows: Sequence[Row]
    check: Callable[..., None] | None = None
    written: Sequence[str] = ()
    any_stride: Sequence[str] = ()
    generic: bool = True


def rows_of(tables, *, right):
    """Parametrize a test by the rows of tables that are right, or by those that are refused."""
    found = [
        pytest.param(table, row, impl, id=f"{table.function.__name__}-{row}-{impl}")
        for table in tables
        for row in [*(tensors(table) if table.generic else ()), *table.rows]
        if (row.outcome is RIGHT) is right and not (right and table.check is None)
        for impl in row.impls
    ]
    return pytest.mark.parametrize(["table", "row", "impl"], found)


def zeros(*shape, dtype=torch.float32):
    """Zeros on the device of the tests."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def refused(name, *values, blamed=None, error=ValueError):
    """Rows of values that are refused."""
    return [Row(name, value, error, blamed) for value in values]


def right(name, *values):
    """Rows of values that give the oracle's result."""
    return [Row(name, value, RIGHT) for value in values]


def values(name, *changes):
    """Rows of refused values in memory."""
    return [Row(name, change, impls=CHECKED) for change in changes]


def unsupported(name, value, blamed=None):
    """A row of what Triton does not support."""
    return Row(name, value, NotImplementedError, blamed, ("triton",))


def far(name, shape, stride):
    """A value: a tensor with elements too far apart, of no memory, as all others are then."""

    def value(a):
        there = {n: x.to("meta") for n, x in a.items() if isinstance(x, torch.Tensor)}
        for n, x in a.items():
            if dataclasses.is_dataclass(x):
                there[n] = elsewhere(x)
        made = torch.empty_strided(shape, stride, dtype=a[name].dtype, device="meta")
        return there | {name: made}

    return value


def elsewhere(pages):
    """The same pages on another device."""
    return dataclasses.replace(pages, data=pages.data.to("meta"))


def shorter(name, dim):
    """A value: a tensor that is shorter by one in a dimension."""

    def value(a):
        return a[name].narrow(dim, 0, a[name].shape[dim] - 1)

    value.__name__ = f"shorter in {dim}"
    return value


def tensors(table):
    """Rows of what is no tensor and no pages as the arguments have them, and of ``impl``.

    That is one of another dtype, number of dimensions, device (but for the first argument, whose
    device is that of the call) or last stride (but for those of ``any_stride``), a shorter one, none
    at all where the signature has no None, or, for ``written``, one of elements that share memory.
    """
    rows, arguments = [], table.arguments()
    parameters, first = inspect.signature(table.function).parameters, next(iter(arguments))
    for name, tensor in arguments.items():
        if dataclasses.is_dataclass(tensor):  # pages
            rows += refused(name, None, 3, lambda a, name=name: elsewhere(a[name]))
        if not isinstance(tensor, torch.Tensor):
            continue
        dtype = F16 if tensor.dtype == F64 else F64 if tensor.is_floating_point() else torch.int16
        rows += refused(
            name,
            lambda a, name=name, dtype=dtype: a[name].to(dtype),
            lambda a, name=name: a[name][None],
            3,
        )
        if name != first:
            rows += refused(name, lambda a, name=name: a[name].to("meta"))
        if "None" not in parameters[name].annotation:
            rows += refused(name, None)
        if name not in table.any_stride and tensor.shape[-1] > 1:
            rows += refused(name, lambda a, name=name: a[name].repeat_interleave(2, -1)[..., ::2])
        for dim, size in enumerate(tensor.shape):
            if size and f"{name} {dim}" not in FREE:
                rows.append(Row(name, shorter(name, dim), blamed=(), impls=CHECKED[1:]))
        if name in table.written:
            rows += refused(name, lambda a, name=name: a[name][:1].expand(a[name].shape))
    return [*rows, *refused("impl", "cuda", 3)]


def integers(name, low, high=None, odd=()):
    """Rows of host integers that are none or out of [low, high], and of those in it that are ``odd``."""
    bad = [low - 1, 1.5, float("nan"), True, "1"] + ([] if high is None else [high + 1, 2**40])
    return refused(name, *bad) + right(name, *odd)


def factors(name, least, most):
    """Rows of host numbers that are none or out of 2**least .. 2**most, and of these two."""
    inf, nan = float("inf"), float("nan")
    bad = [0, 0.0, -1.0, nan, inf, 1e38, 3e38, 1e300, 10**400, 1e-38, 1e-45, True, "1"]
    return refused(name, *bad, 2.0**least / 2, 2.0**most * 2) + right(name, 2.0**least, 2.0**most)


def numbers(name):
    """Rows of what is no finite host number."""
    return refused(name, float("nan"), float("inf"), None, True, "1")


def copied(arguments):
    """The arguments, with tensors of their own where a call writes to them."""
    return {
        name: value.clone()
        if isinstance(value, torch.Tensor) and value.device.type == DEVICE
        else value
        for name, value in arguments.items()
    }


def plain(arguments, *without):
    """Arguments of an oracle: those of the call without gradients, and without some of them."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name not in without
    }


def expect_refusal(function, row, arguments, impl):
    """Require that a call is refused as the row says, and that what it could have written is as it was."""
    more = {} if impl is None else {"impl": impl}
    given = row.applied(arguments)
    outputs = {
        name: given[name].clone().float()
        for name in ("out", "lse", "lens", "state", "buffer", "k_pages")
        if isinstance(given.get(name), torch.Tensor) and given[name].device.type == DEVICE
    }
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        function(**{**more, **given})
    if row.blamed == ():
        assert str(raised.value).split(":")[0] in given, raised.value
    else:
        assert type(raised.value) is row.outcome, raised.value
        start = f"{row.blamed or row.name}: "
        assert str(raised.value).startswith(start), f"{raised.value} does not start with {start}"
    for name, before in outputs.items():
        same = torch.equal(before.nan_to_num(3.0), given[name].float().nan_to_num(3.0))
        assert same, f"{name} was changed"
