"""Launches of a layer in a decode step, counted on a CPU with the kernels that a device runs."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.attention import launch
from quire.kernels.common import checks, launching
from quire.kernels.common.arch import named
from quire.kvcore.device import AttnMetadata
from quire.models.config.named import get_config
from quire.models.deepseek_v4 import model as v4
from quire.models.deepseek_v4.config import CSA, HCA, SLIDING
from quire.models.engine.memory import model_cache
from quire.models.families import gpt_oss
from quire.models.layers import basic
from quire.models.loading.random_weights import random_model

# Two or three are attention and the write of its rows, four matrix products. With experts, routing
# takes four more, its product in fp32 included (gpt-oss: two), and the experts four.
BARS = {
    "llama-tiny": 11, "gemma3-tiny": 11, "gemma4-tiny": 11, "gemma4-e-tiny": 15,
    "gemma4-moe-tiny": 22, "gpt-oss-tiny": 15,
}  # fmt: skip
V4_BARS = {SLIDING: 22, HCA: 25, CSA: 32}


# What gives memory and launches nothing.
FREE = {"empty", "empty_like", "empty_strided", "new_empty"}


class LaunchCounter(TorchDispatchMode):
    """Counts launches by name: operations of torch that are no views, and kernels of Triton, which it does not run."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts = Counter()
        monkeypatch.setattr(launching, "launch", self._launch)
        monkeypatch.setattr(checks, "is_readable", lambda tensor: False)

    def _launch(self, kernel, grid, **arguments):
        if min(grid) > 0:
            self.counts[kernel.__name__.strip("_")] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        shared = storages(args) >= storages(out) and not func._schema.is_mutable
        if not shared and name not in FREE:
            self.counts[name] += 1
        return out


def storages(values):
    """Addresses of the memory of all tensors among values."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return {x.untyped_storage().data_ptr() for x in tensors}


def one_product(x, weight):
    """``linear_fp32`` as a device runs it, with a result of its dtype: one launch."""
    return torch.zeros(len(x), len(weight))


def launches(name, context, monkeypatch):
    """(kind of attention, launches) of each layer, in bf16 on a GPU with room for splits."""
    monkeypatch.setattr(launch, "arch_and_sms", lambda tensor: (named("sm_90"), 132))
    for module in (basic, v4, gpt_oss):
        monkeypatch.setattr(module, "linear_fp32", one_product)
    model = random_model(get_config(name), dtype=torch.bfloat16)
    cache = model_cache(model, max_requests=2)
    seq_lens = torch.tensor([context, context - 9], dtype=torch.int32)
    # Of every group; values do not count.
    pages = torch.ones(2, context // 16 + 1, dtype=torch.int32)
    attn = AttnMetadata(
        cu_seqlens_q=torch.arange(3, dtype=torch.int32), seq_lens=seq_lens,
        block_tables=(pages,) * len(cache.groups),
        slot_mappings=(torch.tensor([40, 80]),) * len(cache.groups), max_seqlen_q=1,
        max_seq_len=context, num_decodes=2, request_slots=torch.arange(2, dtype=torch.int32),
    )  # fmt: skip
    ids, pool = torch.tensor([5, 6]), cache.allocate(20)

    counter, found = LaunchCounter(monkeypatch), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: counter.counts.clear())
        layer.register_forward_hook(lambda *_: found.append(counter.counts.copy()))
    with counter:
        model(ids, seq_lens.long() - 1, attn, pool, impl="triton")
    return list(zip(model.config.layer_types, found, strict=True))


@pytest.mark.parametrize("name", BARS)
def test_launches_of_a_layer(name, monkeypatch):
    experts = {"route": 1, "order": 1, "product": 2, "combine": 1}
    for _, counts in launches(name, 4000, monkeypatch):
        assert counts.total() <= BARS[name], counts
        if BARS[name] <= 15 and name != "gpt-oss-tiny":
            # Merged: q with k and v, gate with up. E has two more, and a sum of its own.
            more = name == "gemma4-e-tiny"
            assert counts["linear"] == 4 + 2 * more
            assert counts["residual_norm_kernel"] == 2 + more
        else:
            assert {kernel: counts[f"{kernel}_kernel"] for kernel in experts} == experts


def test_launches_of_a_layer_of_deepseek_v4(monkeypatch):
    """Of the last layer of each kind: work that a step does once falls on the first ones."""
    for kind, counts in dict(launches("deepseek-v4-tiny", 31, monkeypatch)).items():
        assert counts.total() <= V4_BARS[kind], f"{kind}: {counts.total()}: {counts}"
        # Rows of experts are added up where they are written to the streams.
        assert counts["expand_kernel"] == 2 and "combine_kernel" not in counts
