"""The mechanics of reading a DeepSeek-V4 checkpoint: headers first, everything compared with the model, then tensor by tensor."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..layers.quantized import DEQUANTIZE, FP4_GROUP, packed_shapes, scale_values
from ..loading import checkpoint
from ..loading.checkpoint import FLOATS, differs
from ..loading.finite import expect_finite, expect_finite_packed, expect_ids
from .names import GATE, UP, WHOLE, Target, target

_SCALES = {"fp8": ("F32", "F8_E8M0", "U8"), "fp4": ("F8_E8M0", "U8")}
_PACKED = ("F8_E4M3", "I8", "U8")
_TABLES = ("I64", "I32")  # of experts by token id


@dataclass(frozen=True)
class Stored(checkpoint.Stored):
    """One tensor of a checkpoint, and what of the model it fills."""

    target: Target

    @property
    def quantized(self) -> str | None:
        """The format of values that need scales, "fp8" or "fp4"; else None."""
        return None if self.target.is_scale else {"F8_E4M3": "fp8", "I8": "fp4", "U8": "fp4"}.get(self.dtype)  # fmt: skip


def read_headers(path: Path) -> list[Stored]:
    """Every tensor of a directory that belongs to the model, whatever its name; raises as `quire.models.loading.checkpoint.read_headers`."""
    return [
        Stored(one.file, one.name, one.shape, one.dtype, where)
        for one in checkpoint.read_headers(path)
        if (where := target(one.name)) is not None
    ]


def format_of_experts(stored: list[Stored]) -> str | None:
    """How the routed experts are quantised: "fp8", "fp4" or None.

    Raises: NotImplementedError where they are not all the same.
    """
    formats: dict[str | None, Stored] = {}
    for tensor in stored:
        if ".mlp.experts." in tensor.target.parameter and not tensor.target.is_scale:
            formats.setdefault(tensor.quantized, tensor)
    if len(formats) > 1:
        of = " and ".join(f"{tensor.dtype} of {tensor}" for tensor in formats.values())
        raise NotImplementedError(f"experts: expected one format for all, got {of}")
    return next(iter(formats), None)


def place(parameters: dict[str, nn.Parameter], where: Target) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """The part of the model's weights that a stored tensor fills: (values, scales if these stay packed); None = no such part."""
    weight = parameters.get(where.parameter)
    packed = parameters.get(where.parameter + ".weight")
    if where.expert is None:
        return None if weight is None else (weight, None)
    stack = packed if weight is None else weight
    if stack is None or not where.expert < len(stack):
        return None
    if weight is not None:
        matrix = weight[where.expert]
        if where.part != WHOLE:
            matrix = matrix.chunk(2)[where.part == UP]
        return matrix, None
    assert packed is not None
    at = (where.expert,) if where.part == WHOLE else (where.expert, int(where.part == UP))
    return packed[at], parameters[where.parameter + ".scale"][at]


def check(path: Path, stored: list[Stored], model: nn.Module) -> None:
    """Compares names, shapes and dtypes with those of the model, which may be on the meta device.

    Raises: ValueError naming at once every tensor that is missing, unexpected, there twice, or of another shape or dtype.
    """
    parameters = dict(model.named_parameters())
    found = checkpoint.unique(path, ((tensor.target, tensor) for tensor in stored))
    values = {where: tensor for where, tensor in found.items() if not where.is_scale}
    scales = {where: tensor for where, tensor in found.items() if where.is_scale}
    missing = [name for where in _wanted(parameters) for name in _absent(where, values)]
    unexpected, misshaped, mistyped, doubled = [], [], [], []
    for where, tensor in values.items():
        spot, kind = place(parameters, where), tensor.quantized
        whole = values.get(Target(where.parameter))
        if where.expert is not None and whole is not None:
            doubled.append(f"{whole} and {tensor}")
        if spot is None:
            unexpected.append(str(tensor))
            continue
        weight, packed = spot
        dtypes = FLOATS if weight.is_floating_point() else _TABLES
        if packed is None and (kind is None or weight.ndim != 2 or dtypes is _TABLES):
            misshaped += differs(tensor, tensor.shape, tuple(weight.shape))
            mistyped += differs(tensor, tensor.dtype, dtypes)
            continue
        rows, columns = _matrix_shape(spot, kind)
        if kind is None or (kind == "fp4" and columns % FP4_GROUP):
            mistyped += differs(
                tensor, tensor.dtype, (*FLOATS, "F8_E4M3") if packed is None else _PACKED
            )
            continue
        weight_shape, _, scale_shape, _ = packed_shapes(kind, rows, columns)
        misshaped += differs(tensor, tensor.shape, weight_shape)
        scale = scales.pop(_scale_of(where), None)
        if scale is None:
            missing.append(f"{tensor.name.removesuffix('weight')}scale")
        else:
            misshaped += differs(scale, scale.shape, scale_shape)
            mistyped += differs(scale, scale.dtype, _SCALES[kind])
    unexpected += [str(tensor) for tensor in scales.values()]
    checkpoint.refuse_misfits(
        path, missing=missing, unexpected=unexpected, misshaped=misshaped, mistyped=mistyped, doubled=doubled
    )  # fmt: skip


def fill(model: nn.Module, stored: list[Stored]) -> None:
    """Copies every tensor to its place, dequantised unless it stays packed. Call :func:`check` first.

    Raises: ValueError naming the first tensor with a weight that is NaN or infinite, or with an expert that is none.
    """
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    scales = {t.target: t for t in stored if t.target.is_scale}
    with ExitStack() as stack, torch.no_grad():
        device = str(next(iter(parameters.values())).device)
        files = {
            file: stack.enter_context(safe_open(file, framework="pt", device=device))
            for file in sorted({tensor.file for tensor in stored})
        }
        for tensor in stored:
            if tensor.target.is_scale:
                continue
            spot = place(parameters, tensor.target)
            assert spot is not None
            weight, packed_scale = spot
            values = files[tensor.file].get_tensor(tensor.name)
            if not weight.is_floating_point() and packed_scale is None:
                weight.copy_(values)
                expect_ids(weight, model.config.num_experts, tensor)
                continue
            if tensor.quantized is None:
                weight.copy_(values)
                expect_finite(weight, tensor)
                continue
            of = scales[_scale_of(tensor.target)]
            scale = files[of.file].get_tensor(of.name)
            if packed_scale is None:
                weight.copy_(DEQUANTIZE[tensor.quantized](values, scale, weight.dtype))
                expect_finite(weight, tensor)
            else:
                weight.copy_(values.view(weight.dtype))
                fp8 = tensor.quantized == "fp8"
                packed_scale.copy_(scale_values(scale) if fp8 else scale.view(torch.uint8))
                expect_finite_packed(tensor.quantized, weight, packed_scale, (tensor, of), model.dtype)  # fmt: skip


def _scale_of(where: Target) -> Target:
    return Target(where.parameter, where.expert, where.part, is_scale=True)


def _wanted(parameters: dict[str, nn.Parameter]) -> list[tuple[str, int]]:
    """Names of all weights, and how many experts each stacks (0 = it is no stack)."""
    wanted = []
    for name, weight in parameters.items():
        if ".mlp.experts." not in name:
            wanted.append((name, 0))
        elif not name.endswith(".scale"):
            wanted.append((name.removesuffix(".weight"), len(weight)))
    return wanted


def _absent(wanted: tuple[str, int], values: dict[Target, Stored]) -> list[str]:
    name, num_experts = wanted
    if Target(name) in values:
        return []
    if not num_experts:
        return [name]
    parts = (GATE, UP) if name.endswith("gate_up_proj") else (WHOLE,)
    return [
        f"{name}[{expert}]" + ("" if part == WHOLE else f".{part}")
        for expert in range(num_experts)
        for part in parts
        if Target(name, expert, part) not in values
    ]


def _matrix_shape(spot: tuple[Tensor, Tensor | None], kind: str | None) -> tuple[int, int]:
    rows, columns = spot[0].shape
    return rows, columns * 2 if spot[1] is not None and kind == "fp4" else columns
