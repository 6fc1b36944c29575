"""The check of the main benchmark with every family."""

import pytest
import torch

from quire.bench.common.workload import chat_workload
from quire.bench.prefill_decode.build import build_model
from quire.bench.prefill_decode.drive import run_workload
from quire.bench.prefill_decode.verify import check_outputs, computing_in
from quire.models.engine.engine import Engine, EngineConfig

NAMES = ("gemma3-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.fixture(scope="module", params=NAMES)
def built(request):
    return build_model(request.param, device=torch.device("cpu"))


@pytest.mark.parametrize("built", ["gemma4-e-tiny", "gpt-oss-tiny"], indirect=True)
def test_output_is_checked(built):
    workload = chat_workload(built.tokenizer.encode, bos_token_id=2, limit=2, scale=0.1)
    engine = Engine(built.model, EngineConfig(num_pages=500))
    outputs = run_workload(engine, workload, concurrency=2).outputs
    assert any(o.num_cached_tokens for o in outputs.values())
    check = check_outputs(built.model, outputs)
    assert check.problems == ()
    assert check.num_tokens == sum(len(o.token_ids) for o in outputs.values())


def test_other_precision_reaches_every_weight(built):
    """All but the table whose rows are converted as they are read; the weights are left alone."""
    model, ids = built.model, torch.arange(3, 40)
    before = [(name, w.data_ptr(), w.clone()) for name, w in model.named_parameters()]
    exact, seen = model.full_forward(ids), set()

    def narrow_ones(prefix, module):
        named = module.named_parameters(prefix)
        seen.update(name for name, weight in named if weight.dtype == torch.bfloat16)

    hooks = [
        layer.register_forward_hook(lambda m, *_, prefix=f"layers.{i}": narrow_ones(prefix, m))
        for i, layer in enumerate(model.layers)
    ]
    with computing_in(model, torch.bfloat16):
        narrow_ones("", model)
        rough = model.full_forward(ids)
    for hook in hooks:
        hook.remove()
    names = {name for name, *_ in before}
    assert (
        names - seen <= {"embed_tokens.weight", "embed_tokens_per_layer.weight"} and seen <= names
    )
    narrow = type(model)(model.config, device="cpu", dtype=torch.bfloat16)
    if model.config.per_layer_input_size:
        narrow.embed_tokens_per_layer = model.embed_tokens_per_layer
    for target, source in zip(narrow.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    assert rough.equal(narrow.full_forward(ids)) and not rough.equal(exact)
    for weight, (_, pointer, value) in zip(model.parameters(), before, strict=True):
        assert weight.data_ptr() == pointer and torch.equal(weight, value)
    assert torch.equal(model.full_forward(ids), exact)
