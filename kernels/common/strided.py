"""Kernel arguments: a tensor and its strides as one named tuple, so that neither goes without the
other.

Triton specialises each field as it does a loose argument: a stride that is a multiple of 16 keeps
that hint, a stride of 1 and None are constants. An argument that is None as a whole is one, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """Rows of tokens and heads, [num_tokens, num_heads, channels].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_token: elements from one token to the next.
        stride_head: elements from one head to the next.
    """

    data: Any
    stride_token: Any
    stride_head: Any


class Pages(NamedTuple):
    """Rows in pages, [num_pages, block_size, num_kv_heads, channels] or without channels.

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_page: elements from one page to the next.
        stride_row: elements from one row of a page to the next.
        stride_head: elements from one head to the next.
    """

    data: Any
    stride_page: Any
    stride_row: Any
    stride_head: Any


class Table(NamedTuple):
    """The block table, [num_seqs, width] int32.

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_seq: elements from one sequence to the next.
        width: entries of a sequence.
    """

    data: Any
    stride_seq: Any
    width: Any


def rows(tensor: torch.Tensor | None) -> Rows | None:
    """A tensor [num_tokens, num_heads, channels] with its strides; None for None."""
    return None if tensor is None else Rows(tensor, *tensor.stride()[:2])


def lse_rows(tensor: torch.Tensor | None) -> Rows | None:
    """The lse [num_heads, num_tokens], whose tokens lie side by side; None for None."""
    return None if tensor is None else Rows(tensor, 1, tensor.stride(0))


def pages(tensor: torch.Tensor) -> Pages:
    """A tensor [num_pages, block_size, num_kv_heads, ...] with its strides."""
    return Pages(tensor, *tensor.stride()[:3])


def table(tensor: torch.Tensor) -> Table:
    """A block table [num_seqs, width] with its strides."""
    return Table(tensor, tensor.stride(0), tensor.shape[1])


class Matrix(NamedTuple):
    """Rows of channels, [num_rows, channels].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_row: elements from one row to the next.
    """

    data: Any
    stride_row: Any


class Cells(NamedTuple):
    """Rows of channels that need not lie side by side, [num_rows, channels].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_row: elements from one row to the next.
        stride_column: elements from one channel to the next.
    """

    data: Any
    stride_row: Any
    stride_column: Any


class PagedRows(NamedTuple):
    """Rows of channels in pages, [num_pages, block_size, channels].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_page: elements from one page to the next.
        stride_row: elements from one row of a page to the next; 0 where a kernel knows it of
            quantized pages.
    """

    data: Any
    stride_page: Any
    stride_row: Any


def matrix(tensor: torch.Tensor | None) -> Matrix | None:
    """A tensor [num_rows, channels] with its stride; None for None."""
    return None if tensor is None else Matrix(tensor, tensor.stride(0))


def cells(tensor: torch.Tensor) -> Cells:
    """A tensor [num_rows, channels] with its strides."""
    return Cells(tensor, *tensor.stride())


class Matrices(NamedTuple):
    """A stack of matrices, [num_matrices, parts, rows, columns].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_matrix: elements from one matrix to the next.
        stride_part: elements from one part of a matrix to the next; 0 where there is one part.
        stride_row: elements from one row to the next.
        stride_column: elements from one column to the next; 0 where a row is one number.
    """

    data: Any
    stride_matrix: Any
    stride_part: Any
    stride_row: Any
    stride_column: Any


def matrices(
    tensor: torch.Tensor | None, *, parts: bool = True, columns: bool = True
) -> Matrices | None:
    """A tensor [num_matrices, parts, rows, columns] with its strides; None for None.

    Args:
        parts, columns: whether it has this dimension.
    """
    if tensor is None:
        return None
    strides = list(tensor.stride())
    if not parts:
        strides.insert(1, 0)
    return Matrices(tensor, *strides, *([] if columns else [0]))
