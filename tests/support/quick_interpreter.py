"""Triton's interpreter without the work that it repeats for each operation.

Results are the same bits (`tests/kernels/common/test_interpreter.py`). Each function replaces one part
of the interpreter, and leaves it alone in a version of Triton that has no such part.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from triton.runtime import interpreter

core = interpreter.tl.core
Semantic = interpreter.TritonSemantic

# What was replaced: (owner, name of the attribute, what was there).
_replaced: list[tuple[object, str, object]] = []


def quicken() -> None:
    """Replace what is slow in the interpreter; import it with ``TRITON_INTERPRET=1`` only."""
    for part in (
        _patch_once_a_launch,
        _list_builtins_once,
        _call_builtins_directly,
        _no_overflow_checks_that_nothing_reads,
        _numpy_types_by_name,
        _types_equal_themselves,
        _compare_shapes_as_numbers,
        _shapes_once,
        _constants_once,
        _equal_operands,
    ):
        try:
            part()
        except AttributeError:  # this version of Triton has no such part
            continue


@contextmanager
def as_shipped() -> Iterator[None]:
    """The interpreter without what `quicken` replaced."""
    quick = [(owner, name, getattr(owner, name)) for owner, name, _ in _replaced]
    for owner, name, shipped in _replaced:
        setattr(owner, name, shipped)
    try:
        yield
    finally:
        for owner, name, new in quick:
            setattr(owner, name, new)


def _replace(owner: object, name: str, new: object) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def _patch_once_a_launch() -> None:
    """The interpreter replaces all of ``triton.language`` at each call of a ``@triton.jit`` function
    from a kernel, which is half of the time that kernels take, and finds it replaced already: once a
    launch is enough.
    """
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (interpreter.tl, core)
    patched = set()
    found = {}

    def modules_seen_by(fn):
        """Names of the modules that the interpreter would patch for a function; a rewritten
        function's module has more globals.
        """
        names = fn.__globals__
        key = id(names), len(names)
        if key not in found:
            found[key] = {m.__name__ for m in modules if any(m is x for x in names.values())}
        return found[key]

    def patch_lang_once(fn):
        seen = modules_seen_by(fn)
        if seen and seen <= patched:
            return None  # a call from a kernel has no use for the scope
        patched.update(seen)
        return patch_lang(fn)

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    _replace(interpreter, "_patch_lang", patch_lang_once)
    _replace(interpreter.GridExecutor, "__call__", launch_anew)


def _list_builtins_once() -> None:
    """Listing the members of ``triton.language`` at each launch is slow; they are always the same."""
    is_builtin = core.is_builtin
    found = {}

    def patch_builtin(pkg, builder, *scope):
        if pkg not in found:
            found[pkg] = [(n, m) for n, m in inspect.getmembers(pkg) if is_builtin(m)]
        for name, member in found[pkg]:
            if getattr(pkg, name) is member:  # and not replaced already, in this launch
                interpreter._patch_attr(pkg, name, member, builder, *scope)

    _replace(interpreter, "_patch_builtin", patch_builtin)


def _call_builtins_directly() -> None:
    """A function of ``triton.language`` that the interpreter replaces calls a check of an argument
    that is given here, and that calls the function.
    """
    checked = core.builtin(lambda: None).__code__
    patch_attr, semantic = interpreter._patch_attr, interpreter.interpreter_semantic

    def patch_attr_directly(obj, name, member, builder, *scope):
        if not scope or getattr(member, "__code__", None) is not checked:
            return patch_attr(obj, name, member, builder, *scope)
        function = member.__wrapped__

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope[0].set_attr(obj, name, call)

    _replace(interpreter, "_patch_attr", patch_attr_directly)


def _no_overflow_checks_that_nothing_reads() -> None:
    """The interpreter computes each sum, difference and product of integers again in int64, for an
    assertion that it makes with ``debug`` only.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        _replace(builder, "options", options)


def _numpy_types_by_name() -> None:
    """The interpreter builds a table of all types for each look-up."""
    np_dtype = interpreter._get_np_dtype
    known = {}

    def np_dtype_by_name(tt_dtype):
        if type(tt_dtype) is not core.dtype:
            return np_dtype(tt_dtype)
        if tt_dtype.name not in known:
            known[tt_dtype.name] = np_dtype(tt_dtype)
        return known[tt_dtype.name]

    _replace(interpreter, "_get_np_dtype", np_dtype_by_name)


def _types_equal_themselves() -> None:
    equal = core.dtype.__eq__

    def equal_or_same(self, other):
        return self is other or equal(self, other)

    _replace(core.dtype, "__eq__", equal_or_same)


def _compare_shapes_as_numbers() -> None:
    """To compare a shape with a list, the interpreter wraps each number and its type."""
    equal = core.tuple.__eq__

    def equal_numbers(self, other):
        values = other.values if type(other) is core.tuple else other
        if type(values) is list and all(type(x) is int for x in values):
            return core.constexpr(self.values == values)
        return equal(self, other)

    _replace(core.tuple, "__eq__", equal_numbers)


def _shapes_once() -> None:
    """Types and tensors of one shape share it and the number of elements, which nothing changes."""
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    blocks, tensors, names = {}, {}, {}
    shared = {}  # from ids of shapes that types share

    def as_ints(shape):
        """The shape as a tuple of int; None if it is anything else."""
        values = shape.values if type(shape) is core.tuple else shape
        sizes = builtins.tuple(x.value if type(x) is core.constexpr else x for x in values)
        return sizes if all(type(x) is int for x in sizes) else None

    def block_init_once(self, element_ty, shape):
        known_type = type(element_ty) in (core.dtype, core.pointer_type)
        kept = shared.get(id(shape)) if known_type else None
        if kept is None:
            sizes = as_ints(shape) if known_type else None
            kept = blocks.get(sizes)
            if kept is None:
                block_init(self, element_ty, shape)
                if sizes is not None:
                    own = ("element_ty", "name")
                    kept = {k: v for k, v in self.__dict__.items() if k not in own}
                    # `blocks` holds the shape, so that its id stays its own.
                    blocks[sizes] = shared[id(self.shape)] = kept
                return
        self.__dict__.update(kept)
        self.element_ty = element_ty
        key = id(self.shape), element_ty.name
        if key not in names:
            names[key] = f"<{self.shape}, {element_ty}>"
        self.name = names[key]

    def tensor_init_once(self, handle, type):
        shape = type.__dict__.get("shape")  # None for a scalar
        kept = tensors.get(id(shape))
        if kept is None:
            tensor_init(self, handle, type)
            if shape is None or id(shape) in shared:
                tensors[id(shape)] = self.shape, self.numel
            return
        self.shape, self.numel = kept
        self.handle, self.type, self.dtype = handle, type, type.scalar

    _replace(core.block_type, "__init__", block_init_once)
    _replace(core.tensor, "__init__", tensor_init_once)


def _constants_once() -> None:
    """Equal constants share an array, which nothing may write to; each has a handle of its own, as
    the interpreter may give a handle another array.
    """
    scalar_constant = Semantic.scalar_constant
    known = {}

    def scalar_constant_once(self, value, dtype):
        # NaN equals nothing, and -0.0 equals 0.0.
        if type(value) not in (int, float) or value != value or str(value) == "-0.0":
            return scalar_constant(self, value, dtype)
        if type(dtype) is not core.dtype:
            return scalar_constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in known:
            constant = scalar_constant(self, value, dtype)
            constant.handle.data.flags.writeable = False
            known[key] = constant.handle.data, constant.handle.dtype
        data, handle_dtype = known[key]
        return self.tensor(interpreter.TensorHandle(data, handle_dtype), dtype)

    _replace(Semantic, "scalar_constant", scalar_constant_once)


def _equal_operands() -> None:
    """Operands of one type and one shape are neither converted nor broadcast; and a number beside an
    operand that stays as it is becomes the same tensor each time.
    """
    check = Semantic.binary_op_type_checking_impl
    # Types that no operation widens or refuses.
    closed = {"int32", "int64", "fp32"}
    numbers = {}

    def check_unless_equal(self, lhs, rhs, *args, **kwargs):
        if type(lhs) is core.tensor:
            if type(rhs) is core.tensor:
                same = lhs.shape is rhs.shape and lhs.dtype.name in closed
                if same and lhs.dtype.name == rhs.dtype.name:
                    return lhs, rhs
            elif type(rhs) in (int, float):
                return with_number(self, 1, lhs, rhs, args, kwargs)
        elif type(rhs) is core.tensor and type(lhs) in (int, float):
            return with_number(self, 0, rhs, lhs, args, kwargs)
        return check(self, lhs, rhs, *args, **kwargs)

    def with_number(self, side, tensor, number, args, kwargs):
        """The operands, of which the one of `side` is a number."""
        # -0.0 equals 0.0 (and NaN equals nothing, but for itself as the same object).
        negative_zero = number == 0 and str(number) == "-0.0"
        key = (
            (side, tensor.type.name, type(number), number, negative_zero, args, *kwargs.items())
        )  # fmt: skip
        kept = numbers.get(key)
        if kept is None:
            operands = (tensor, number) if side else (number, tensor)
            operands = check(self, *operands, *args, **kwargs)
            if operands[1 - side] is tensor and type(tensor.dtype) is core.dtype:
                constant = operands[side]
                constant.handle.data.flags.writeable = False
                numbers[key] = constant.handle.data, constant.handle.dtype, constant.type
            return operands
        data, dtype, of_type = kept
        constant = self.tensor(interpreter.TensorHandle(data, dtype), of_type)
        return (tensor, constant) if side else (constant, tensor)

    _replace(Semantic, "binary_op_type_checking_impl", check_unless_equal)
