"""Cache groups of a model, from the shapes of its layers.

One page id stands for a page in each of the page tensors that the engine allocates. The j-th layer
of every group has its rows in tensor j and sees it with its own shape. So layers with different
heads, head sizes and block sizes share one pool::

              tensor 0      tensor 1
    group 0   layer 2       layer 5        full attention
    group 1   layer 0       layer 3        sliding window
    group 2   layer 1       layer 4        sliding window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import as_int, refusal
from .spec import GroupSpec

PAGE_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class LayerShape:
    """Cached bytes and window of one attention layer.

    Args:
        token_bytes: bytes of a token: keys and values of all heads, or a latent.
        sliding_window: W tokens including the query itself; None for full attention.
        scale_bytes: further bytes of a token, such as scales, that do not affect block sizes.

    Raises:
        ValueError: a field is out of range.
    """

    token_bytes: int
    sliding_window: int | None = None
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        as_int("token_bytes", self.token_bytes, 1)
        as_int("scale_bytes", self.scale_bytes, 0)
        if self.sliding_window is not None:
            as_int("sliding_window", self.sliding_window, 1)


@dataclass(frozen=True)
class LayerPlacement:
    """Cache group of one layer, and which page tensor has its rows."""

    group: int
    tensor: int


def cache_groups(
    layers: Sequence[LayerShape], *, base_block_size: int = 16
) -> tuple[list[GroupSpec], list[LayerPlacement]]:
    """Deal layers of one shape into groups of about equal size, with pages of equal bytes.

    A group has at most as many layers as the rarest shape, or as the commonest if that has less
    than 1.5 times as many. All pages are as large as the largest: lighter layers put more tokens in
    theirs if the sizes divide, and leave a rest unused otherwise.

    Args:
        layers: layers with a cache of their own, in the order of the model. A layer that reads
            another one's cache has the placement of that one.
        base_block_size: tokens in a page of the heaviest shape.

    Returns:
        (groups, placement of each layer). Full-attention groups come first; the engine allocates
        ``1 + max(tensor)`` tensors of [num_pages, page_bytes].

    Raises:
        ValueError: no layers, not LayerShapes, or a base_block_size below 1.

    Source: vLLM 0.33 ``v1/core/kv_cache_utils`` (group sizes, page unification).
    """
    base_block_size = as_int("base_block_size", base_block_size, 1)
    shapes: dict[LayerShape, list[int]] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, LayerShape):
            raise refusal("layers", "LayerShapes", repr(layer))
        shapes.setdefault(layer, []).append(i)
    if not shapes:
        raise refusal("layers", "at least one LayerShape", "none")
    kinds = sorted(shapes, key=lambda shape: shape.sliding_window is not None)
    counts = sorted(map(len, shapes.values()))
    group_size = counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0]
    largest = max(shape.token_bytes for shape in kinds)
    block_sizes = {
        shape: base_block_size
        * (largest // shape.token_bytes if largest % shape.token_bytes == 0 else 1)
        for shape in kinds
    }
    page_bytes = max(
        block_sizes[shape] * (shape.token_bytes + shape.scale_bytes) for shape in kinds
    )
    # Rows of every page start at a multiple of 16 bytes.
    page_bytes = -(-page_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    groups: list[GroupSpec] = []
    placement = [LayerPlacement(-1, -1)] * len(layers)
    for shape, name in zip(kinds, _names(kinds), strict=True):
        members = shapes[shape]
        num_groups = -(-len(members) // group_size)
        for i in range(num_groups):
            for tensor, layer_index in enumerate(members[i::num_groups]):
                placement[layer_index] = LayerPlacement(len(groups), tensor)
            groups.append(
                GroupSpec(
                    name=f"{name}.{i}",
                    kind="dense" if shape.sliding_window is None else "window",
                    block_size=block_sizes[shape],
                    page_bytes=page_bytes,
                    sliding_window=shape.sliding_window,
                )
            )
    return groups, placement


def _names(kinds: list[LayerShape]) -> list[str]:
    plain = ["full" if shape.sliding_window is None else "sliding" for shape in kinds]
    return [
        name if plain.count(name) == 1 else f"{name}_{plain[:i].count(name)}"
        for i, name in enumerate(plain)
    ]
