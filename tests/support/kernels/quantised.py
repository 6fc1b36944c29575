"""The largest distance of a quantised row from the exact one: half a step of e4m3 at its scale, and what it may be off before it is quantised."""

import torch

from quire.bench.common.bounds import allowed
from tests.kernels.oracles import latent_write as reference_latent


def assert_quantised(name, actual, exact, group):
    """Require each number of ``actual`` [rows, channels] within half a step of e4m3 of ``exact`` (fp64).

    Args:
        name: starts the message of a failure.
        actual: what a reader of the page sees.
        exact: what was rounded to bf16 and quantised.
        group: channels that share a scale.
    """
    before = allowed(exact, torch.bfloat16)
    largest = exact.abs() + before
    step = torch.empty_like(largest)
    for row in range(exact.shape[0]):
        for first in range(0, exact.shape[1], group):
            sizes = largest[row, first : first + group]
            scale = 2.0 ** reference_latent.scale_exponent(sizes.tolist())
            # 3 bits of mantissa: half a step is 2^-4 of the power of two below, 2^-10 at the least.
            step[row, first : first + group] = (
                torch.exp2((sizes / scale).clamp(min=2**-6).log2().floor()) * 2**-4 * scale
            )
    excess = (actual.double() - exact).abs() - step - before
    # "not <=" rather than ">": NaN fails.
    assert (excess <= 0).all(), f"{name}: {excess.max():.3g} over half a step"
