"""Float64 results beside a bound of how far a right program may be from them, on any machine and in
any order of summation.

Inside `bounding`, float64 arithmetic of torch gives `Bounded` tensors: a value, and for each
element the largest error that a program can make that does the same sums in fp32. So an oracle, run
once in float64, tells both what is right and what must be allowed::

    with bounding(weights=torch.bfloat16):
        exact = oracle(...)  # its tensors are float64
    budget = allowed(exact, torch.bfloat16)

This is running error analysis, with worst cases added up and never a sample of them:

    one operation     errs by at most UNIT = 2^-23 of its result: twice what rounding to nearest
                      gives, all that truncating matrix units lose
    a sum of n terms  errs by gamma(n) = n UNIT / (1 - n UNIT) of the sum of magnitudes, in whatever
                      order and pieces it is taken
    softmax, lse      n logits in tiles of TILE or more, each with an exponential and a rescaling of
                      what came before (`_exponentials`); logits that are off by d_j change
                      weight j by at most exp(d_j + log sum_k p_k exp(d_k)) - 1
    weights, results  are rounded to nearest in the dtype that the program keeps them in

Values that go in are exact: they are what the program reads. What is not a rounding (a key too
many, a scale forgotten) is not allowed for.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 3.1 and 3.3 (running error
analysis), 4.2 (any order of summation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

UNIT = 2.0**-23
# Errors, in units, of an exponential or root; of a hyperbolic tangent made of an exponential.
EXP_UNITS = 2
TANH_UNITS = 16
# Keys of the smallest tile of a softmax: tokens that ``compress`` pools at once.
TILE = 8


class Bounded(Tensor):
    """A float64 tensor with ``error``, a tensor like it: how far a right program may be from each
    element; ``value`` is its memory as an ordinary tensor.

    A part of it is bounded as well; of arithmetic outside of `bounding` only values come out.
    """

    error: Tensor
    value: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in MOVED or func in MOVED_PROPERTIES:
                return _move(func, args, kwargs)
            return func(*_map(_value, args), **_map(_value, kwargs))


def bounded(value: Tensor, error: Tensor | None = None) -> Bounded:
    """A tensor with errors; without any it is exact."""
    value = _value(value)
    result: Bounded = value.as_subclass(Bounded)
    result.value = value
    result.error = torch.zeros_like(value) if error is None else error
    return result


def allowed(exact: Bounded, dtype: torch.dtype) -> Tensor:
    """Largest distance of each element of a result from ``exact``, when rounded to ``dtype``;
    float64, NaN or infinite where ``exact`` is.
    """
    value, error = _parts(exact)
    return error + _rounding(value.abs() + error, dtype)


def gamma(count: int | Tensor) -> Any:
    """Relative error of ``count`` operations one after another."""
    return count * UNIT / (1 - count * UNIT)


def rounded(x: Bounded, dtype: torch.dtype) -> Bounded:
    """Bounded value of ``x`` after it is stored in ``dtype``."""
    with torch._C.DisableTorchFunction():
        return bounded(x, allowed(x, dtype))


class bounding(TorchFunctionMode):
    """A context in which float64 arithmetic is `Bounded`.

    Attributes:
        weights: the dtype that weights of a softmax are rounded to.
    """

    def __init__(self, weights: torch.dtype = torch.float32):
        super().__init__()
        self.weights = weights
        self._latest: tuple[Any, ...] = ()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in LOOKED_UP and type(args[0]) is Tensor:  # most of what an oracle's loops do
            return func(*args, **kwargs)
        if name in RULES and any(map(_is_wide, args)):
            return _apply(RULES[name], args, kwargs)
        if name in ("softmax", "logsumexp") and _is_wide(args[0]):
            return self._softmax(name, *args, **kwargs)
        if not any(type(x) is Bounded for x in _flat([*args, *kwargs.values()])):
            made = func(*args, **kwargs)
            return bounded(made) if name in MADE and made.dtype == torch.float64 else made
        if name == "__setitem__":
            return _set(*args)
        if name in ("add_", "fill_"):
            _set(args[0], ..., _apply(_add, args, kwargs) if name == "add_" else args[1])
            return args[0]
        if name in MOVED or func in MOVED_PROPERTIES:
            return _move(func, args, kwargs)
        result = func(*_map(_value, args), **_map(_value, kwargs))
        if isinstance(result, Tensor) and result.is_floating_point():
            raise NotImplementedError(f"bounding: no rule for {name}")
        return result

    def _softmax(self, name: str, x: Any, dim: int, keepdim: bool = False) -> Bounded:
        """Weights of logits, or their lse; a logit of -inf is none."""
        a, da = _parts(x)
        if a.shape[dim] == 0:
            return bounded(a if name == "softmax" else a.logsumexp(dim, keepdim))
        # An oracle asks for lse and weights of the same logits, one after the other.
        version = (dim, a._version, da._version)
        if not self._latest or self._latest[0] is not x or self._latest[1] != version:
            self._latest = (x, version, *_exponentials(a, da, dim))
        off, p, drift, steps = self._latest[2:]
        if name == "logsumexp":
            value = a.logsumexp(dim, keepdim)
            error = drift + steps
            error = (error if keepdim else error.squeeze(dim)) + 4 * UNIT * value.abs()
            return bounded(value, torch.where(value.isfinite(), error, 0.0))
        error = p * torch.expm1(off + drift + steps)
        # Weights are kept against the largest logit, so what fp16 loses of small ones is relative
        # to the largest weight.
        tiny = _smallest(self.weights) * p.amax(dim, keepdim=True)
        if self.weights != torch.float32:
            error = error + _rounding(p + error, self.weights)
        return bounded(torch.softmax(a, dim), error + tiny)


def _is_wide(x: Any) -> bool:
    return type(x) is Bounded or (isinstance(x, Tensor) and x.dtype == torch.float64)


def _flat(items: Any) -> list[Any]:
    return [y for x in items for y in (_flat(x) if isinstance(x, (list, tuple)) else [x])]


def _map(change: Callable[[Any], Any], items: Any) -> Any:
    if isinstance(items, dict):
        return {name: _map(change, x) for name, x in items.items()}
    if isinstance(items, (list, tuple)):
        mapped = [_map(change, x) for x in items]
        return mapped if isinstance(items, list) else tuple(mapped)
    return change(items)


def _value(x: Any) -> Any:
    return x.value if type(x) is Bounded else x


def _parts(x: Any) -> tuple[Tensor, Tensor]:
    """Value and error of a tensor or a number."""
    if isinstance(x, Bounded):
        return _value(x), x.error
    value = torch.as_tensor(x, dtype=torch.float64)
    return value, torch.zeros_like(value)


def _move(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply an operation that only moves numbers to their errors too."""
    values = func(*_map(_value, args), **_map(_value, kwargs))

    def error(x: Any) -> Any:
        if isinstance(x, Bounded):
            return x.error
        exact = isinstance(x, Tensor) and x.is_floating_point()
        return torch.zeros_like(x) if exact else x

    errors = func(*_map(error, args), **_map(error, kwargs))
    if isinstance(values, Tensor):
        return _wide(values, errors)
    return tuple(map(_wide, values, errors))


def _wide(value: Tensor, error: Tensor) -> Bounded:
    if value.dtype != torch.float64:
        raise NotImplementedError(f"bounding: a bounded number became {value.dtype}")
    return bounded(value, error)


def _set(target: Tensor, index: Any, source: Any) -> None:
    if not isinstance(target, Bounded):
        raise NotImplementedError("bounding: a bounded number put into a tensor made outside")
    value, error = _parts(source)
    _value(target)[index] = value
    target.error[index] = error


def _apply(rule: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Bounded:
    """A rule takes (value, error) of each operand and gives (value, error): of an operation without
    its own rounding, and how many units that is.
    """
    value, error, units = rule(*args, **kwargs)
    return bounded(value, error + units * UNIT * (value.abs() + error))


def _add(x: Any, y: Any, sign: int = 1) -> tuple[Tensor, Tensor, float]:
    (a, da), (b, db) = _parts(x), _parts(y)
    return a + sign * b, da + db, 1


def _mul(x: Any, y: Any) -> tuple[Tensor, Tensor, float]:
    if type(x) is Bounded and type(y) is Bounded:
        (a, da), (b, db) = _parts(x), _parts(y)
        return a * b, a.abs() * db + da * b.abs() + da * db, 1
    if type(x) is not Bounded:
        x, y = y, x  # a product with a number or a tensor without errors
    a, b = (_value(z).double() if isinstance(z, Tensor) else z for z in (x, y))
    value = a * b
    return value, x.error * abs(b) if type(x) is Bounded else torch.zeros_like(value), 1


def _div(x: Any, y: Any) -> tuple[Tensor, Tensor, float]:
    (a, da), (b, db) = _parts(x), _parts(y)
    least = (b.abs() - db).clamp(min=0)
    return a / b, (da + (a / b).abs() * db) / least, 1


def _sqrt(x: Any) -> tuple[Tensor, Tensor, float]:
    a, da = _parts(x)
    return a.sqrt(), torch.where(da > 0, da / a.sqrt(), 0.0), EXP_UNITS


def _rsqrt(x: Any) -> tuple[Tensor, Tensor, float]:
    a, da = _parts(x)
    return a.rsqrt(), (a - da).clamp(min=0).rsqrt() - a.rsqrt(), EXP_UNITS


def _tanh(x: Any) -> tuple[Tensor, Tensor, float]:
    a, da = _parts(x)
    return a.tanh(), da, TANH_UNITS


def _sigmoid(x: Any) -> tuple[Tensor, Tensor, float]:
    """1 / (1 + exp(-x)): an exponential whose argument is multiplied by log2(e) first, a sum and a
    division, which errs by 2 units on GPUs.
    """
    a, da = _parts(x)
    off = da + (2 * a.abs() + EXP_UNITS) * UNIT  # of the exponent, and of the exponential
    value = a.sigmoid()
    error = torch.maximum((a + off).sigmoid() - value, value - (a - off).sigmoid())
    return value, error + _smallest(torch.float32), 3  # where the exponential overflows


def _clamp(
    x: Any, min: float | None = None, max: float | None = None
) -> tuple[Tensor, Tensor, float]:
    a, da = _parts(x)
    return a.clamp(min, max), da, 0


def _matmul(x: Any, y: Any) -> tuple[Tensor, Tensor, float]:
    (a, da), (b, db) = _parts(x), _parts(y)
    size_a = a.abs() + da if type(x) is Bounded else a.abs()
    size_b = b.abs() + db if type(y) is Bounded else b.abs()
    error = gamma(a.shape[-1]) * (size_a @ size_b)
    if type(x) is Bounded:
        error = error + da @ size_b
    if type(y) is Bounded:
        error = error + a.abs() @ db
    return a @ b, error, 0


def _sum(x: Any, dim: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor, float]:
    a, da = _parts(x)
    dim = tuple(range(a.dim())) if dim is None else dim
    value = a.sum(dim, keepdim)
    count = a.numel() // max(1, value.numel())
    error = da.sum(dim, keepdim) + gamma(count) * (a.abs() + da).sum(dim, keepdim)
    return value, error, 0


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor, float]:
    value, error, _ = _sum(x, dim, keepdim)
    count = _parts(x)[0].numel() // max(1, value.numel())
    return value / count, error / count, 1


def _masked_fill(x: Any, mask: Tensor, value: float) -> tuple[Tensor, Tensor, float]:
    a, da = _parts(x)
    return a.masked_fill(mask, value), da.masked_fill(mask, 0.0), 0


def _exponentials(a: Tensor, da: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Of logits and their errors: errors of the exponents; weights; log sum_k p_k exp(off_k), exact
    for errors far below UNIT as well; relative error of a weight by the steps of a softmax.
    """
    live = a.isfinite()
    count: Any = a.shape[dim]
    if not live.all():
        count = live.sum(dim, keepdim=True).double()
    log_count = torch.log1p(torch.as_tensor(count, dtype=torch.float64))
    size, p = torch.where(live, a.abs(), 0.0), torch.where(live, torch.softmax(a, dim), 0.0)
    # A logit and the maximum are multiplied by log2(e), subtracted, and stored by pieces with
    # log(count).
    slack = 8 * UNIT * (size + size.amax(dim, keepdim=True) + (log_count + 1))
    off = torch.where(live, da + slack, 0.0)
    drift = torch.log1p((p * torch.expm1(off)).sum(dim, keepdim=True))
    # A tile is rescaled by an exponential and two products, and as much happens at both ends.
    return off, p, drift, (EXP_UNITS + 2) * UNIT * (count / TILE + 4) + gamma(count)


def _smallest(dtype: torch.dtype) -> float:
    """Half of the smallest number of a dtype; GPUs flush fp32's subnormals."""
    info = torch.finfo(dtype)
    return info.tiny if dtype == torch.float32 else info.tiny * info.eps / 2


def _rounding(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest error of rounding numbers of these magnitudes to nearest."""
    return torch.finfo(dtype).eps / 2 * size + _smallest(dtype)


RULES = {
    "add": _add,
    "__radd__": _add,
    "sub": lambda x, y: _add(x, y, -1),
    "__rsub__": lambda x, y: _add(y, x, -1),
    "rsub": lambda x, y: _add(y, x, -1),
    "mul": _mul,
    "__rmul__": _mul,
    "multiply": _mul,
    "div": _div,
    "__rdiv__": lambda x, y: _div(y, x),
    "__rtruediv__": lambda x, y: _div(y, x),
    "square": lambda x: _mul(x, x),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "neg": lambda x: (*_mul(x, -1)[:2], 0),
    "clamp": _clamp,
    "relu": lambda x: _clamp(x, 0.0),
    "matmul": _matmul,
    "__matmul__": _matmul,
    "sum": _sum,
    "mean": _mean,
    "masked_fill": _masked_fill,
}
MADE = {"empty", "zeros", "full", "ones", "empty_like", "zeros_like", "full_like", "clone"}
MOVED = {
    "__getitem__", "to", "double", "cpu", "clone", "contiguous", "reshape", "view", "flatten",
    "unflatten", "transpose", "permute", "unbind", "squeeze", "unsqueeze", "expand", "split",
    "chunk", "stack", "cat", "detach", "index_select", "gather", "repeat_interleave",
}  # fmt: skip
LOOKED_UP = {"__getitem__", "__get__", "item", "tolist", "to"}
MOVED_PROPERTIES = {Tensor.T.__get__, Tensor.mT.__get__}
assert math.isclose(UNIT, torch.finfo(torch.float32).eps)
