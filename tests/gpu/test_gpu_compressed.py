"""``compressed_attention`` on the device: the shapes of DeepSeek-V4, and runs repeated."""

import pytest
import torch

from quire.kernels import compressed_attention
from tests.gpu.conftest import DRY_RUN, assert_neither_waits_nor_allocates, captured
from tests.kernels.latent.test_compressed import attend
from tests.kernels.latent.test_flash_mla import exactly as exact_slots
from tests.kernels.latent.test_flash_mla import make_call
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.kernels.compressed_cases import Case, exactly, make_batch

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
REPEATS = 2 if DRY_RUN else 20
REAL = {"head_dim": 512, "rope_dim": 64, "dtype": BF16, "rows": 64}
V4 = REAL | {"sliding_window": 128}


def v4_cases():
    """Heads of Flash, Pro and their shards; both formats; decode, speculative decode, a prefill chunk, and both at once."""
    if DRY_RUN:
        return [
            Case(
                "dry",
                [40, 9],
                [1, 1],
                ratio=4,
                topk=6,
                num_heads=8,
                fp8=True,
                in_step=False,
                **REAL,
            )
        ]
    cases = []
    for fp8 in (False, True):
        for num_heads, topk in ((8, 512), (16, 512), (64, 512), (128, 1024)):
            name = f"h{num_heads}-{'fp8' if fp8 else 'bf16'}"
            shared = V4 | {"num_heads": num_heads, "fp8": fp8}
            csa = shared | {"ratio": 4, "topk": topk, "entry_rows": 64}
            hca = shared | {"ratio": 128, "entry_rows": 2}
            cases += [
                Case(f"csa-decode-{name}", [5001, 127, 1, 700], [1] * 4, in_step=not fp8, **csa),
                Case(f"csa-mixed-{name}", [4099, 900], [1, 9], num_decodes=1, **csa),
                Case(f"hca-decode-{name}", [70001, 128, 0, 900], [1] * 4, in_step=not fp8, **hca),
                Case(f"hca-speculative-{name}", [33000, 301], [2, 2], num_decodes=2, **hca),
                Case(f"hca-prefill-{name}", [1300, 77], [21, 17], **hca),
                Case(f"window-prefill-{name}", [400], [19], **shared),
            ]
    return cases


def check(case, out, lse, batch):
    exact, exact_lse = exactly(batch)
    assert_within_budget("out", out.cpu(), exact)
    assert_within_budget("lse", lse.cpu(), exact_lse)


@pytest.mark.parametrize("case", v4_cases(), ids=lambda case: case.name)
def test_v4_shapes(case):
    batch = make_batch(case)
    lse = torch.full((case.num_heads, batch["q"].shape[0]), NAN, device=DEVICE)
    first = attend(batch, "triton", lse=lse)
    check(case, first, lse, batch)
    # The same work again, with the caches in another state: a race shows as another result.
    for _ in range(REPEATS):
        again = torch.full_like(lse, NAN)
        assert attend(batch, "triton", lse=again).equal(first) and again.equal(lse)


@pytest.mark.parametrize("num_heads", [8] if DRY_RUN else [8, 16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_flash_mla(num_heads, fp8):
    from quire.kernels import flash_mla_with_kvcache

    arguments, lists = make_call(fp8=fp8, num_heads=num_heads)
    exact, exact_lse = exact_slots(arguments, lists)
    out, lse = flash_mla_with_kvcache(**arguments, impl="triton")
    assert_within_budget("out", out.flatten(0, 1).cpu(), exact)
    assert_within_budget("lse", lse.transpose(0, 1).flatten(1).cpu(), exact_lse)


def test_calls_neither_synchronise_nor_allocate(cuda):
    case = Case("", [900, 5000], [1, 1], ratio=4, topk=512, num_heads=16, entry_rows=64, **V4)
    batch = make_batch(case)
    memory = {
        "out": torch.empty_like(batch["q"]),
        "lse": torch.empty(16, 2, device=cuda),
        "workspace": torch.empty(132 * 64 * 513 * 2, device=cuda),
    }
    assert_neither_waits_nor_allocates(lambda: compressed_attention(**batch, **memory))


def test_a_captured_decode_serves_other_lengths(cuda):
    """Work is divided on the device: replayed for other lengths, a graph gives what a call of its own gives."""
    case = Case(
        "",
        [40000, 9000],
        [1, 1],
        ratio=128,
        num_heads=16,
        entry_rows=2,
        in_step=False,
        inverse_rope=False,
        ring=False,
        **V4,
    )
    batch = make_batch(case)
    window = batch["window_pages"].data
    window.nan_to_num_()  # a linear table of pages: shorter sequences look at other rows
    batch["compressed_pages"].data.nan_to_num_()
    for name in ("window_table", "compressed_table"):
        pages = batch[name.replace("table", "pages")].data.shape[0]
        batch[name] = torch.randint_like(batch[name], pages)
    out = torch.empty_like(batch["q"])
    graph = captured(lambda: compressed_attention(**batch, out=out))
    for seq_lens in ([40000, 9000], [1, 0], [127, 128], [129, 39999]):
        batch["seq_lens"].copy_(torch.tensor(seq_lens, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        assert out.equal(compressed_attention(**batch)), seq_lens
