"""Scales of an fp8 cache that a checkpoint brings: a number for a layer's keys, one for its values.

Source: compressed-tensors ``kv_cache_scheme``; the names that vLLM 0.33's
``maybe_remap_kv_scale_name`` and ModelOpt's exports have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from .checkpoint import Stored, open_tensors, refuse_misfits
from .names import text_name

_NAME = re.compile(
    r"layers\.(\d{1,6})\.self_attn\."
    r"(?:(?:attn\.|kv_cache\.)?(k|v|kv)_scale|(k|v)_proj\.(?:\3_scale|output_scale))"
)


def read_kv_scales(
    path: Path, stored: Iterable[Stored], num_layers: int
) -> tuple[list[tuple[float, float]], set[Stored]]:
    """(pairs of each layer's scales, 1.0 where there is none, and the tensors that are scales).

    ValueError names two for one, those of no layer, and one that is no finite number above 0.
    """
    found: dict[tuple[int, str], Stored] = {}
    doubled, unexpected = [], []
    for one in stored:
        if (name := _NAME.fullmatch(text_name(one.name))) is None:
            continue
        if int(name[1]) >= num_layers:
            unexpected.append(str(one))
        for part in name[2] or name[3]:
            if (first := found.setdefault((int(name[1]), part), one)) is not one:
                doubled.append(f"{first} and {one}")
    refuse_misfits(path, doubled=doubled, unexpected=unexpected)
    pairs = [[1.0, 1.0] for _ in range(num_layers)]
    for (layer, part), one in found.items():
        if math.prod(one.shape) != 1:
            raise ValueError(
                f"path: expected scales of keys and values of one number, got {one} of shape "
                f"{list(one.shape)}"
            )
        with open_tensors(one.file) as tensors:
            scale = tensors.get_tensor(one.name).float().item()
        if not 0 < scale < math.inf:
            raise ValueError(
                f"path: expected a finite number above 0, got {scale} of {one}, a scale of keys or "
                "values"
            )
        pairs[layer]["kv".index(part)] = scale
    return [(k, v) for k, v in pairs], set(found.values())
