"""Checks that passed are not made again for equal values and tensors laid out alike, and no others.
Values are read once within `one_step`, for the same tensors and equal values."""

import pytest
import torch

from quire.kernels.common.checks import accept, once_a_step, one_step
from quire.kernels.common.latent_pages import LatentPages

X = torch.zeros(4, 6)
PAGES = torch.zeros(3, 2, 64)


def pages(data: torch.Tensor, rope_dim: int = 32) -> LatentPages:
    return LatentPages(data, 2, 64, rope_dim)


@pytest.mark.parametrize(
    ("first", "second", "is_known"),
    [
        ((X, 1), (torch.ones(4, 6), 1), True),
        ((X, None), (X, None), True),
        ((X, 1), (torch.zeros(4, 7), 1), False),
        ((X, 1), (torch.zeros(4, 7)[:, :6], 1), False),
        ((X, 1), (X.double(), 1), False),
        ((X, 1), (X.to("meta"), 1), False),
        ((X, 1), (X, 2), False),
        ((X, 1), (X, True), False),
        ((X, 1), (X, 1.0), False),
        ((X, 1), (X, None), False),
        ((X, X, 1), (X, None, 1), False),
        ((X, pages(PAGES)), (X, pages(PAGES.clone())), True),
        ((X, pages(PAGES)), (X, pages(torch.zeros(4, 2, 64))), False),
        ((X, pages(PAGES)), (X, pages(PAGES, 16)), False),
        ((X, [1]), (X, [1]), False),
    ],
)
def test_arguments_that_passed(first, second, is_known):
    calls = []

    def check(*args):
        calls.append(args)

    accept(None, check, *first)
    accept(None, check, *second)
    assert len(calls) == (1 if is_known else 2)


def test_a_refusal_is_not_remembered():
    def check(value):
        raise ValueError("value")

    for _ in range(2):
        with pytest.raises(ValueError):
            accept(None, check, 1)


def test_values_are_kept_within_a_step_alone():
    lengths, others = torch.tensor([1, 2]), torch.tensor([1, 2])

    def read(tensor, number):
        return [*tensor.tolist(), number]

    def reads():
        return [once_a_step(read, tensor, n) for tensor, n in ((lengths, 3), (others, 3), (lengths, 4))]  # fmt: skip

    for first in (1, 5):
        lengths[0] = first
        with one_step():
            kept = reads()
            assert kept == [[first, 2, 3], [1, 2, 3], [first, 2, 4]]
            lengths[0] = 9
            assert all(a is b for a, b in zip(reads(), kept, strict=True))
        assert reads()[0] == [9, 2, 3]


def test_a_step_that_fails_keeps_nothing():
    lengths = torch.tensor([1])
    with pytest.raises(ZeroDivisionError), one_step():
        once_a_step(torch.Tensor.tolist, lengths)
        raise ZeroDivisionError
    lengths[0] = 2
    assert once_a_step(torch.Tensor.tolist, lengths) == [2]
