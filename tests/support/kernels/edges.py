"""Tables of what each argument of a public function may be: what a test of edges needs beside the function and its oracle."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.support.helpers import DEVICE

RIGHT = "right"
IMPLS = ("torch", "triton")
U32 = 2.0**-24
HUGE = (2**31 - 1, 2**31, 2**40)


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of one argument.

    name: the argument. value: of it; a function of all other arguments is called, and may return several by name. outcome: RIGHT, or the error,
    whose message starts with the name of the argument or with ``blamed``. impls: those that can tell.
    """

    name: str
    value: Any
    outcome: Any = ValueError
    blamed: str | None = None
    impls: tuple[str, ...] = IMPLS

    def __str__(self) -> str:
        if callable(self.value):
            source = inspect.getsource(self.value).split("lambda", 1)[-1]
            return f"{self.name}={' '.join(source.split())[:50]}"
        return f"{self.name}={self.value!r}"[:50]

    def applied(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with this one changed."""
        value = self.value(arguments) if callable(self.value) else self.value
        return arguments | (value if isinstance(value, dict) else {self.name: value})


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros on the device of the tests."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def largest(*tensors: torch.Tensor | None) -> float:
    """The largest magnitude in any of the tensors, NaN left out; 0.0 where there is none."""
    sizes = [
        t.float().abs().nan_to_num(0.0).max().item() for t in tensors if t is not None and t.numel()
    ]
    return max(sizes, default=0.0)


def refused(
    name: str, *values: Any, blamed: str | None = None, error: type = ValueError
) -> list[Row]:
    """Rows of values that are refused."""
    return [Row(name, value, error, blamed) for value in values]


def right(name: str, *values: Any) -> list[Row]:
    """Rows of values that give the oracle's result."""
    return [Row(name, value, RIGHT) for value in values]


def no_tensors(
    name: str, dtype: torch.dtype, *, optional: bool = True, first: bool = False
) -> list[Row]:
    """Rows of what is no such tensor: of another dtype, with one more dimension, and no tensor at all; on another device, unless it is the
    first one, whose device is that of the call."""
    rows = [
        Row(name, lambda a: a[name].to(dtype)),
        Row(name, lambda a: a[name][None]),
        Row(name, 3),
    ]
    if not first:
        rows.append(Row(name, lambda a: a[name].to("meta")))
    return rows if optional and not first else [*rows, Row(name, None)]


def integers(name: str, low: int, high: int | None = None, odd: Iterable[int] = ()) -> list[Row]:
    """Rows of host integers that are none or out of [low, high], and of those in it that are ``odd``."""
    bad = [low - 1, 1.5, float("nan"), True, "1"] + ([] if high is None else [high + 1, 2**40])
    return refused(name, *bad) + right(name, *odd)


def factors(name: str, least: int, most: int) -> list[Row]:
    """Rows of host numbers that are none or out of 2**least .. 2**most, and of these two."""
    inf, nan = float("inf"), float("nan")
    bad = [0, 0.0, -1.0, nan, inf, 1e38, 3e38, 1e300, 10**400, 1e-38, 1e-45, True, "1"]
    return refused(name, *bad, 2.0**least / 2, 2.0**most * 2) + right(name, 2.0**least, 2.0**most)


def overlapping(name: str) -> list[Row]:
    """Rows of a result of which all rows lie in one place."""
    return [Row(name, lambda a: a[name][:1].expand(a[name].shape))]


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with tensors of their own where a call writes to them."""
    return {
        name: value.clone()
        if isinstance(value, torch.Tensor) and value.device.type == DEVICE
        else value
        for name, value in arguments.items()
    }


def expect_refusal(
    function: Callable[..., Any], row: Row, arguments: dict[str, Any], impl: str | None
) -> None:
    """Require that a call is refused as the row says, and that what it could have written is as it was."""
    more = {} if impl is None else {"impl": impl}
    given = row.applied(arguments)
    outputs = {
        name: given[name].clone().float()
        for name in ("out", "lse", "lens", "state", "k_pages")
        if isinstance(given.get(name), torch.Tensor) and given[name].device.type == DEVICE
    }
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        function(**{**more, **given})
    assert type(raised.value) is row.outcome, raised.value
    start = f"{row.blamed or row.name}: "
    assert str(raised.value).startswith(start), f"{raised.value} does not start with {start}"
    for name, before in outputs.items():
        same = torch.equal(before.nan_to_num(3.0), given[name].float().nan_to_num(3.0))
        assert same, f"{name} was changed"


def expect_all_arguments(
    function: Callable[..., Any], rows: Iterable[Row], without: Iterable[str] = ()
) -> None:
    """Require a row for each argument of a function."""
    missing = (
        set(inspect.signature(function).parameters) - {row.name for row in rows} - set(without)
    )
    assert not missing, f"no row for {sorted(missing)}"


def attention_bound(logit: float, keys: int, dim: int, value: float) -> float:
    """The largest distance of fp32 attention in any order of summation from the exact result, of logits and values up to these sizes.

    A logit is off by dim + 16 roundings (products, scales, the base of the exponential), a weight by that, the exponential's own four and a
    sum of all keys, twice; the sum of weights times values once more. Twice that for terms of higher order.
    """
    weight = 2 * ((dim + 16) * U32 * logit + 4 * U32) + (2 * keys + 8) * U32
    return 2 * (weight + keys * U32) * max(1.0, value)


def assert_near(what: str, actual: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    """Require results within ``bound``, and infinities where the exact result has them."""
    actual, exact = actual.double().cpu(), exact.double().cpu()
    finite = torch.isfinite(exact)
    assert torch.equal(actual[~finite], exact[~finite]), f"{what}: {actual} is not {exact}"
    error = (actual - exact)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= bound, f"{what}: error {error:.3g}, bound {bound:.3g}"
