"""Steps that attend through FlashInfer beside quire's kernels; where there is no GPU, through its stand-in."""

import pytest
import torch

from tests.gpu.conftest import DRY_RUN
from tests.models.layers.test_flashinfer import STEPS, sized, steps_through_both
from tests.support import flashinfer_stand_in
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def package(monkeypatch):
    if DRY_RUN:
        flashinfer_stand_in.install(monkeypatch)
    else:
        pytest.importorskip("flashinfer")


def test_a_step_attends_to_what_the_kernels_do():
    """With kernels that `bench.environment` compiles ahead."""
    config, dtype = sized("gemma3-tiny", head_dim=128), torch.bfloat16
    for theirs, ours in steps_through_both(config, STEPS["mixed"], DEVICE, dtype):
        # Outputs of about 1: roundings of weights and of the output, in both.
        torch.testing.assert_close(theirs, ours, rtol=0, atol=4 * torch.finfo(dtype).eps)
