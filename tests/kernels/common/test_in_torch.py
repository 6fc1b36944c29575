"""Values read once a step: within `one_step` alone, for the same tensors and equal values."""

import pytest
import torch

from quire.kernels.common.in_torch import once_a_step, one_step


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
