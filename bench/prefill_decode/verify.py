"""Checks what an engine generated against full forward passes without any cache or kernel of ours.

Greedy tokens can only be compared up to rounding: two correct programs round differently, and where
two logits are nearly equal the other token wins. So each generated token must have, in a reference
pass over the whole sequence, the largest logit or one that is less than ``bound`` below it. It is
an estimate, no bound of all right programs as `quire.bench.common.bounds` has it for one operation:
through many layers, worst cases add up to more than logits differ by. err is the largest difference
between the logits of an eager pass in low precision and of a pass in fp32 over the same rows; a
program as exact as twice that moves each of the two logits by up to 2 err::

    bound = 4 * err

A model in fp32 is itself the reference. Rounding errors scale with the machine epsilon, so its err
is that of a pass in bf16, scaled by 2^-23 / 2^-7, the two epsilons.

Pages of e4m3 (``kv_cache_dtype="fp8"``) move the logits by more than the model's arithmetic does,
and by how much depends on where a prompt was cut into steps, as a step's own keys and values are
not rounded. So a hit and a cold run may differ by that much as well. cache_err is the largest
difference that rounding *every* key and value makes to a pass; the engine rounds some of them, so
it is taken to be no further off::

    bound = 4 * err + 2 * cache_err

A bound as large as the standard deviation of the logits would let nearly any token pass; that is a
problem too, not a success.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quire.models.config.model import ModelConfig
from quire.models.engine.outputs import RequestOutput
from quire.models.families.decoder import Decoder
from quire.models.layers.basic import RMSNorm

from .drive import Key

E4M3_MAX = 448.0
LATENT, ROTATED, BLOCK = 512, 64, 64  # channels of a latent row that can be quantised
STREAMED = ("layers", "embed_tokens_per_layer")  # too large for a copy of the whole
MARGIN = 4.0  # two logits, each off by up to twice the error of the eager pass
CACHE_MARGIN = 2.0  # two logits, each off by up to what rounding all keys and values does
FP32_FROM_BF16 = torch.finfo(torch.float32).eps / torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class Check:
    """Result of `check_outputs`.

    Attributes:
        num_requests, num_tokens: compared.
        num_exact: tokens with the largest logit; the others are within the bound or in problems.
        largest_bound: of any compared request, in logits.
        problems: one message for each request that differs, with its first wrong token.
    """

    num_requests: int
    num_tokens: int
    num_exact: int
    largest_bound: float
    problems: tuple[str, ...]


def sample(outputs: Mapping[Key, RequestOutput], count: int) -> list[Key]:
    """At most ``count`` >= 1 of the keys: the request with the longest hit, and others evenly
    spaced. The same ones every time.
    """
    keys = sorted(outputs)
    if count >= len(keys):
        return keys
    longest_hit = max(keys, key=lambda key: outputs[key].num_cached_tokens)
    rest = [key for key in keys if key != longest_hit]
    spaced = (rest[i * len(rest) // (count - 1)] for i in range(count - 1))
    return sorted([longest_hit, *spaced])


def check_outputs(
    model: Decoder, outputs: Mapping[Key, RequestOutput], *, kv_cache_dtype: str = "auto"
) -> Check:
    """Compares all tokens of all ``outputs`` with full passes of ``model``; see the file's
    docstring.

    Args:
        kv_cache_dtype: of the engine that generated them
            (`quire.models.engine.config.EngineConfig`).
    """
    num_tokens = num_exact = 0
    largest = 0.0
    problems = []
    for (session, turn), output in sorted(outputs.items()):
        tokens = torch.tensor(output.prompt_token_ids + output.token_ids, device=model.device)
        rows = torch.arange(
            len(output.prompt_token_ids) - 1, len(tokens) - 1, device=model.device
        )  # the row before a token decides it
        reference, bound = reference_logits(model, tokens[:-1], rows, kv_cache_dtype)
        best, best_ids = reference.max(dim=-1)
        chosen = tokens[rows + 1]
        gap = best - reference.gather(1, chosen[:, None]).squeeze(1)
        where = f"request (session {session}, turn {turn + 1})"
        spread = float(reference.std())
        if bound >= spread:
            problems.append(
                f"{where}: cannot be checked, rounding moves its logits by {bound:.3g}, "
                f"and they spread by {spread:.3g} only"
            )
            continue
        wrong = ~(gap < bound) & (chosen != best_ids) | ~torch.isfinite(best)
        num_tokens += len(rows)
        num_exact += int((chosen == best_ids).sum())
        largest = max(largest, bound)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            problems.append(
                f"{where}, output token {i}: got {int(chosen[i])}, the full forward says "
                f"{int(best_ids[i])}, {float(gap[i]):.3g} logits above (allowed for a near-tie: "
                f"{bound:.3g}); {int(wrong.sum())} of its {len(rows)} tokens are wrong"
            )
    return Check(len(outputs), num_tokens, num_exact, largest, tuple(problems))


def reference_logits(
    model: Decoder, input_ids: Tensor, rows: Tensor, kv_cache_dtype: str = "auto"
) -> tuple[Tensor, float]:
    """Logits of a full pass in fp32, and how far below the largest one a right program's choice may
    be.

    Args:
        input_ids: [num_tokens] int64.
        rows: [num_rows] int64.
        kv_cache_dtype: as in :func:`check_outputs`.

    Returns:
        ([num_rows, vocab_size] fp32, bound in logits).
    """
    native = model.full_forward(input_ids, logits_rows=rows)
    is_fp32 = model.dtype == torch.float32
    with computing_in(model, torch.bfloat16 if is_fp32 else torch.float32):
        other = model.full_forward(input_ids, logits_rows=rows)
    bound = MARGIN * float((native - other).abs().max()) * (FP32_FROM_BF16 if is_fp32 else 1)
    if kv_cache_dtype != "auto":
        stored = e4m3_rows if isinstance(model.config, ModelConfig) else e4m3_latents
        if kv_cache_dtype == "fp8_per_tensor":
            stored = e4m3_values
        rounded = model.full_forward(input_ids, logits_rows=rows, stored=stored)
        bound += CACHE_MARGIN * float((rounded - native).abs().max())
    return (native if is_fp32 else other), bound


def e4m3_rows(rows: Tensor) -> Tensor:
    """Keys or values [..., head_dim] as pages of e4m3 give them back: a scale for each row."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / E4M3_MAX
    return (_in_e4m3(rows / scale) * scale).to(rows.dtype)


def e4m3_values(rows: Tensor) -> Tensor:
    """Keys or values as pages of e4m3 with the scale 1 give them back."""
    return _in_e4m3(rows.float().clamp(-E4M3_MAX, E4M3_MAX)).to(rows.dtype)


def e4m3_latents(rows: Tensor) -> Tensor:
    """Rows of DeepSeek-V4 as its quantised pages give them back. The scale of a block is a power of
    two; latents [..., 512] have 7 blocks of 64 channels and 64 rotated channels in bf16, index keys
    one block.

    Source: FlashMLA's layout of 584 bytes.
    """
    rounded = rows.bfloat16().float()
    width = rows.shape[-1]
    num_plain, block = (LATENT - ROTATED, BLOCK) if width == LATENT else (width, width)
    plain, rotated = rounded[..., :num_plain], rounded[..., num_plain:]
    blocks = plain.unflatten(-1, (-1, block))
    scale = (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX).log2().ceil().exp2()
    return torch.cat([(_in_e4m3(blocks / scale) * scale).flatten(-2), rotated], -1).to(rows.dtype)


def _in_e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).float()


@cache
def _dtypes_in(kind: type[Decoder], config: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes of the weights of a model of ``dtype``, by name."""
    other = kind(config, device="meta", dtype=dtype)
    return {name: weight.dtype for name, weight in other.named_parameters()}


@contextmanager
def computing_in(model: Decoder, dtype: torch.dtype) -> Iterator[None]:
    """Inside, passes of ``model`` use its weights as a model of ``dtype`` has them, one layer's
    copies at a time; afterwards its own tensors are back in place, untouched. Rows of the table of
    per-layer embeddings are converted as they are read. Norms are converted at the start: the layer
    before reads them too."""
    dtypes = _dtypes_in(type(model), model.config, dtype)
    wanted = {weight: dtypes.get(name, weight.dtype) for name, weight in model.named_parameters()}
    saved: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def convert(module: nn.Module, *_: object) -> None:
        with torch.inference_mode(False):  # parameters cannot hold inference tensors
            saved[module] = [(weight, weight.data) for weight in module.parameters()]
            for weight, data in saved[module]:
                weight.data = data.to(wanted[weight])

    def restore(module: nn.Module, *_: object) -> None:
        with torch.inference_mode(False):
            for weight, data in saved.pop(module):
                weight.data = data

    hooks = [layer.register_forward_pre_hook(convert) for layer in model.layers]
    hooks += [layer.register_forward_hook(restore) for layer in model.layers]
    try:
        for name, module in model.named_children():
            if name not in STREAMED:
                convert(module)
        for module in model.layers.modules():
            if isinstance(module, RMSNorm):
                convert(module)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in reversed(list(saved)):
            restore(module)
