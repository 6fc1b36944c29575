"""Check generated tokens against full forward passes without any cache or kernel of ours.

Two right programs round differently. In a pass over the whole sequence in fp32, each generated
token must have the largest logit, or one less than ``bound`` below it. err is the largest
difference between the logits of that pass and of an eager pass in the model's dtype (of a model in
fp32: a pass in bf16, scaled by the ratio of the machine epsilons). A program as exact as twice that
moves each of two logits by up to 2 err. Rounding all K and V to e4m3 moves them by cache_err::

    bound = 4 * err + 2 * cache_err  (of e4m3 pages)

It is an estimate: the worst cases of many layers add up to more than logits differ by. A bound as
large as the standard deviation of the logits is a problem too, not a success.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels import IndexPages, LatentPages, page_bytes
from quire.kernels.common import e4m3
from quire.models.config.model import ModelConfig
from quire.models.engine.outputs import RequestOutput
from quire.models.families.decoder import Decoder
from quire.models.layers.basic import RMSNorm

from .drive import Key

HEAD_DIM = 512  # of a latent row that can be quantized
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
    """At most ``count`` >= 1 keys: the request with the longest hit, and others evenly spaced."""
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
    """Compare all tokens of ``outputs``, made over pages of this dtype, with full passes."""
    num_tokens = num_exact = 0
    largest, problems = 0.0, []
    for (session, turn), output in sorted(outputs.items()):
        tokens = torch.tensor(output.prompt_token_ids + output.token_ids, device=model.device)
        first = len(output.prompt_token_ids) - 1  # the row before a token decides it
        rows = torch.arange(first, len(tokens) - 1, device=model.device)
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
    model: Decoder, input_ids: Tensor, rows: Tensor, kv_cache_dtype: str
) -> tuple[Tensor, float]:
    """Logits [len(rows), vocab_size] fp32 of a full pass over ``input_ids``, and the bound."""
    forward = partial(model.full_forward, input_ids, logits_rows=rows)
    native, is_fp32 = forward(), model.dtype == torch.float32
    with computing_in(model, torch.bfloat16 if is_fp32 else torch.float32):
        other = forward()
    bound = MARGIN * float((native - other).abs().max()) * (FP32_FROM_BF16 if is_fp32 else 1)
    if kv_cache_dtype != "auto":
        stored = e4m3_rows if isinstance(model.config, ModelConfig) else e4m3_latents
        if kv_cache_dtype == "fp8_per_tensor":
            stored = partial(e4m3_rows, scale=1.0)
        bound += CACHE_MARGIN * float((forward(stored=stored) - native).abs().max())
    return (native if is_fp32 else other), bound


def e4m3_rows(rows: Tensor, scale: float | None = None) -> Tensor:
    """Keys or values [..., head_dim] as e4m3 pages return them; scale None: one for each row."""
    return e4m3.dequantize(*e4m3.quantize(rows, scale)).to(rows.dtype)


def e4m3_latents(rows: Tensor) -> Tensor:
    """Latent rows or index keys [..., dim] of DeepSeek-V4 as its quantized pages return them."""
    dim, count = rows.shape[-1], rows.shape[:-1].numel()
    is_latent = dim == HEAD_DIM
    size = page_bytes(count) if is_latent else page_bytes(count, dim + 4)
    make = LatentPages if is_latent else IndexPages
    pages = make(torch.zeros(1, size, dtype=torch.uint8, device=rows.device), count, dim)
    slots = torch.arange(count, device=rows.device)
    pages.write(slots, rows.reshape(count, dim))
    return pages.read(slots, rows.dtype).view_as(rows)


@cache
def _dtypes_in(kind: type[Decoder], config: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes of the weights of a model of ``dtype``, by name."""
    other = kind(config, device="meta", dtype=dtype)
    return {name: weight.dtype for name, weight in other.named_parameters()}


@contextmanager
def computing_in(model: Decoder, dtype: torch.dtype) -> Iterator[None]:
    """Let passes of ``model`` use weights of ``dtype``, copied one layer at a time.

    Norms are converted at the start: the layer before reads them too.
    """
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
    whole = [module for name, module in model.named_children() if name not in STREAMED]
    norms = [module for module in model.layers.modules() if isinstance(module, RMSNorm)]
    try:
        for module in (*whole, *norms):
            convert(module)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in reversed(list(saved)):
            restore(module)
