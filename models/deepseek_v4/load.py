"""The mechanics of reading a DeepSeek-V4 checkpoint: headers first, everything compared with the model, then tensor by tensor."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.models import checkpoint
from quire.models.deepseek_v4.names import GATE, UP, WHOLE, Target, target
from quire.models.quantized import DEQUANTIZE, packed_shapes, scale_values


@dataclass(frozen=True)
class Stored(checkpoint.Stored):
    """One tensor of a checkpoint, and what of the model it fills."""

    target: Target

    @property
    def quantized(self) -> str | None:
        """The format of values that need scales, "fp8" or "fp4"; else None."""
        return None if self.target.is_scale else {"F8_E4M3": "fp8", "I8": "fp4", "U8": "fp4"}.get(self.dtype)  # fmt: skip


def read_headers(path: Path) -> list[Stored]:
    """Every tensor of a directory that belongs to the model, whatever its name; raises as `quire.models.checkpoint.read_headers`."""
    return [
        Stored(one.file, one.name, one.shape, one.dtype, where)
        for one in checkpoint.read_headers(path)
        if (where := target(one.name)) is not None
    ]


def format_of_experts(stored: list[Stored]) -> str | None:
    """How the routed experts are quantised: "fp8", "fp4" or None.

    Raises: NotImplementedError where they are not all the same.
    """
    formats = {
        tensor.quantized
        for tensor in stored
        if ".mlp.experts." in tensor.target.parameter and not tensor.target.is_scale
    }
    if len(formats) > 1:
        raise NotImplementedError(f"experts: expected one format for all, got {formats}")
    return formats.pop() if formats else None


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
    """Compares names and shapes with those of the model, which may be on the meta device.

    Raises: ValueError naming every missing, unexpected and misshaped tensor at once.
    """
    parameters = dict(model.named_parameters())
    values = {t.target: t for t in stored if not t.target.is_scale}
    scales = {t.target: t for t in stored if t.target.is_scale}
    missing = [name for where in _wanted(parameters) for name in _absent(where, values)]
    unexpected = [t.name for where, t in values.items() if place(parameters, where) is None]
    misshaped = []
    for where, tensor in values.items():
        spot = place(parameters, where)
        if spot is None:
            continue
        if tensor.quantized is None:
            _compare(misshaped, tensor, tuple(spot[0].shape))
            if spot[1] is not None:
                misshaped.append(f"{tensor.name} {tensor.dtype} (expected quantised values)")
            continue
        shape = _matrix_shape(spot, tensor.quantized)
        weight_shape, _, scale_shape, _ = packed_shapes(tensor.quantized, *shape)
        _compare(misshaped, tensor, weight_shape)
        scale = scales.pop(_scale_of(where), None)
        if scale is None:
            missing.append(f"{tensor.name.removesuffix('weight')}scale")
        else:
            _compare(misshaped, scale, scale_shape)
    unexpected += [tensor.name for tensor in scales.values()]
    checkpoint.refuse_misfits(path, missing=missing, unexpected=unexpected, misshaped=misshaped)


def fill(model: nn.Module, stored: list[Stored]) -> None:
    """Copies every tensor to its place, dequantised unless it stays packed. Call :func:`check` first."""
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
            if tensor.quantized is None:
                weight.copy_(values)
                continue
            of = scales[_scale_of(tensor.target)]
            scale = files[of.file].get_tensor(of.name)
            if packed_scale is None:
                weight.copy_(DEQUANTIZE[tensor.quantized](values, scale, weight.dtype))
            else:
                weight.copy_(values.view(weight.dtype))
                fp8 = tensor.quantized == "fp8"
                packed_scale.copy_(scale_values(scale) if fp8 else scale.view(torch.uint8))


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


def _matrix_shape(spot: tuple[Tensor, Tensor | None], kind: str) -> tuple[int, int]:
    rows, columns = spot[0].shape
    return rows, columns * 2 if spot[1] is not None and kind == "fp4" else columns


def _compare(misshaped: list[str], tensor: Stored, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        misshaped.append(f"{tensor.name} {list(tensor.shape)} (expected {list(expected)})")
