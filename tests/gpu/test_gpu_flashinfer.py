"""Steps that attend through FlashInfer beside quire's kernels; where there is no GPU, through its stand-in."""

import pytest
import torch

from tests.gpu.conftest import DRY_RUN
from tests.models.layers.test_flashinfer import STEPS, of_64, steps_through_both
from tests.support import flashinfer_stand_in
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def package(monkeypatch):
    if DRY_RUN:
        flashinfer_stand_in.install(monkeypatch)
    else:
        pytest.importorskip("flashinfer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_attends_to_what_the_kernels_do(dtype):
    for theirs, ours in steps_through_both(of_64("gemma3-tiny"), STEPS["mixed"], DEVICE, dtype):
        # Outputs of about 1: two roundings of weights and of the output.
        torch.testing.assert_close(theirs, ours, rtol=0, atol=4 * torch.finfo(dtype).eps)
