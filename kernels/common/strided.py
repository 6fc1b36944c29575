"""Kernel arguments: a tensor and its strides, in elements, as one named tuple.

``data`` is the tensor, and in a kernel its pointer. Triton specialises each field as it does a
loose argument: a stride that is a multiple of 16 keeps that hint, a stride of 1 and None are
constants.
Functions return None for None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """[num_tokens, num_heads, channels]."""

    data: Any
    stride_token: Any
    stride_head: Any


class Pages(NamedTuple):
    """[num_pages, block_size, num_kv_heads, channels], or without channels."""

    data: Any
    stride_page: Any
    stride_row: Any
    stride_head: Any


class PagedMatrix(NamedTuple):
    """[num_pages, block_size, channels]."""

    data: Any
    stride_page: Any
    stride_row: Any  # 0 where a kernel knows it of quantized pages


class Table(NamedTuple):
    """A block table, [num_seqs, width] int32."""

    data: Any
    stride_seq: Any
    width: Any


class Matrix(NamedTuple):
    """[num_rows, channels]."""

    data: Any
    stride_row: Any
    stride_column: Any  # 1 where operators accept nothing else


class Matrices(NamedTuple):
    """[num_matrices, parts, rows, columns]; strides of missing axes are 0."""

    data: Any
    stride_matrix: Any
    stride_part: Any
    stride_row: Any
    stride_column: Any


def rows(tensor: torch.Tensor | None) -> Rows | None:
    return None if tensor is None else Rows(tensor, *tensor.stride()[:2])


def lse_rows(tensor: torch.Tensor | None) -> Rows | None:
    """An lse [num_heads, num_tokens], whose tokens are adjacent."""
    return None if tensor is None else Rows(tensor, 1, tensor.stride(0))


def pages(tensor: torch.Tensor) -> Pages:
    return Pages(tensor, *tensor.stride()[:3])


def table(tensor: torch.Tensor) -> Table:
    return Table(tensor, tensor.stride(0), tensor.shape[1])


def matrix(tensor: torch.Tensor | None, *, any_column: bool = False) -> Matrix | None:
    """``any_column``: channels may lie apart."""
    if tensor is None:
        return None
    return Matrix(tensor, tensor.stride(0), tensor.stride(1) if any_column else 1)


def matrices(
    tensor: torch.Tensor | None, *, parts: bool = True, columns: bool = True
) -> Matrices | None:
    """``Matrices`` of a tensor, with or without the axes of parts and columns."""
    if tensor is None:
        return None
    strides = list(tensor.stride())
    if not parts:
        strides.insert(1, 0)
    return Matrices(tensor, *strides, *([] if columns else [0]))
