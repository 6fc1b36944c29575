"""Extreme and random values in tables, slots, lengths, prefix sums and indices of every operator, in both implementations: a result, or an error that names an argument."""

import random

import pytest
import torch

from tests.kernels import test_latent_edges, test_layer_edges
from tests.kernels.attention import test_edges
from tests.support.helpers import DEVICE
from tests.support.kernels.edges import IMPLS, copied

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on CPUs alone")
TABLES = [
    (function, arguments)
    for module in (test_edges, test_latent_edges, test_layer_edges)
    for function, arguments, *_ in module.TABLES
]


def is_index(value):
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


CASES = [
    pytest.param(function, arguments, id=f"{function.__name__}-{i}")
    for i, (function, arguments) in enumerate(TABLES)
    if any(map(is_index, arguments().values()))
]


def replaced(tensor, rng):
    """A copy with a few values replaced by others, mostly out of range."""
    flat, limits = tensor.clone().view(-1), torch.iinfo(tensor.dtype)
    for _ in range(rng.choice((1, 1, 3))):
        flat[rng.randrange(flat.numel())] = rng.choice(
            [-1, -2, 0, 1, rng.randrange(-99, 99), 10**5, 2**30, limits.min, limits.max]
        )
    return flat.view_as(tensor)


def extremes(tensor):
    """Copies whose last value is out of every range."""
    for value in (torch.iinfo(tensor.dtype).min, 2**30):
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        yield changed


def expect_result_or_name(function, arguments, impl, name, value):
    given = copied(arguments) | {name: value.clone()}
    try:
        function(**given, impl=impl)
    except (ValueError, NotImplementedError) as error:
        assert str(error).split(":")[0].split(".")[0] in given, (name, value, error)
    except Exception as error:
        pytest.fail(f"{name}={value.tolist()}: {error!r}")


@pytest.mark.parametrize("num_random", [0, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_values_of_indices(function, arguments, impl, num_random):
    rng, given = random.Random(5), arguments()
    names = [name for name, value in given.items() if is_index(value) and value.numel()]
    for name in names:
        for value in extremes(given[name]):
            expect_result_or_name(function, given, impl, name, value)
    for _ in range(num_random):
        name = rng.choice(names)
        expect_result_or_name(function, given, impl, name, replaced(given[name], rng))
