"""How far a quantised row may be from the exact one: half a step of e4m3 at its scale, and the rounding to bf16 before it."""

import torch

from quire.kernels.mla import reference_latent

# Before e4m3 a number is fp32 arithmetic rounded to bf16: 2^-9 of it, and as much again for the arithmetic.
ROUNDING = 2**-8


def assert_quantised(
    name: str, actual: torch.Tensor, exact: torch.Tensor, group: int, slack: torch.Tensor | float
) -> None:
    """Require each number of ``actual`` [rows, channels] within half a step of e4m3 of ``exact`` (fp64).

    Args:
        name: starts the message of a failure.
        actual: what a reader of the page sees.
        exact: what was quantised.
        group: channels that share a scale.
        slack: absolute error of the numbers before they were quantised, beside their rounding to bf16.
    """
    largest = exact.abs() * (1 + ROUNDING) + slack
    step = torch.empty_like(exact)
    for row in range(exact.shape[0]):
        for first in range(0, exact.shape[1], group):
            sizes = largest[row, first : first + group]
            scale = 2.0 ** reference_latent.scale_exponent(sizes.tolist())
            # 3 bits of mantissa: half a step is 2^-4 of the power of two below, 2^-10 at the least.
            step[row, first : first + group] = (
                torch.exp2((sizes / scale).clamp(min=2**-6).log2().floor()) * 2**-4 * scale
            )
    excess = (actual.double() - exact).abs() - step - exact.abs() * ROUNDING - slack
    # "not <=" rather than ">": NaN fails.
    assert (excess <= 0).all(), f"{name}: {excess.max():.3g} over half a step"
