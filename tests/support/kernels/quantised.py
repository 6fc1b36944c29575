"""Pages of latents and index keys: poisoned ones, and how far a quantised row may be from the exact one."""

import torch

from quire.bench.common.bounds import allowed
from quire.kernels import IndexPages, LatentPages, page_bytes
from tests.kernels.oracles import latent_write as reference_latent
from tests.support.helpers import DEVICE, NAN


def poisoned_pages(num_pages, rows, dim, rope_dim=None, dtype=torch.float32, device=DEVICE):
    """Pages of NaN that are parts of wider ones; without ``rope_dim`` those of index keys.

    dtype: torch.uint8 for quantised rows: bytes of 255 are NaN as values and as scales.
    """
    if dtype == torch.uint8:
        size = page_bytes(rows) if rope_dim else page_bytes(rows, dim + 4)
        data = torch.full((num_pages, size + 64), 255, dtype=dtype, device=device)[
            :, 32 : size + 32
        ]
    else:
        shape = (num_pages, rows + 1, dim + 16)
        data = torch.full(shape, NAN, dtype=dtype, device=device)[:, 1:, 16:]
    if rope_dim is None:
        return IndexPages(data, rows, dim)
    return LatentPages(data, rows, dim, rope_dim)


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
