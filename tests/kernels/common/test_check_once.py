"""Checks that passed are not made again for equal values and tensors laid out alike, and no others."""

import pytest
import torch

from quire.kernels.common.checks import check_once
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
        ((pages(PAGES),), (pages(PAGES.clone()),), True),
        ((pages(PAGES),), (pages(torch.zeros(4, 2, 64)),), False),
        ((pages(PAGES),), (pages(PAGES, 16),), False),
        ((X, [1]), (X, [1]), False),
    ],
)
def test_arguments_that_passed(first, second, is_known):
    calls = []

    def check(*args):
        calls.append(args)

    check_once(check, *first)
    check_once(check, *second)
    assert len(calls) == (1 if is_known else 2)


def test_a_refusal_is_not_remembered():
    def check(value):
        raise ValueError("value")

    for _ in range(2):
        with pytest.raises(ValueError):
            check_once(check, 1)
