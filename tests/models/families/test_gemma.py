"""Gemma-4 where its logits show nothing: weights before a norm, where a table lies, and layers that run only for rows with wanted logits."""

import torch

from quire.bench.common.bounds import bounding
from quire.models.config.named import get_config
from quire.models.engine.speculative import NGramDrafter
from quire.models.families import gemma
from quire.models.layers import basic
from quire.models.layers.per_layer import HostEmbedding
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.support.helpers import assert_within_budget


def test_embedding_scale_is_rounded_to_bf16():
    place = basic.WeightPlacement(torch.device("cpu"), torch.bfloat16)
    for hidden_size, scale in ((5376, 73.5), (1152, 34.0), (2560, 50.5), (3840, 62.0)):
        assert basic.Embedding(2, hidden_size, place, scale=hidden_size**0.5).scale == scale


def test_router_weights():
    """Norms hide from the logits that weights sum to one before they are scaled: both are seen here, against fp64."""
    router = random_model(get_config("gemma4-moe-tiny"), seed=3).layers[3].router
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    ids, got = router(x)
    for row, chosen, weights_of_row in zip(x.double(), ids, got, strict=True):
        with bounding():
            z = row / (row.square().mean() + 1e-6).sqrt() * router.scale.double() / 8
            p = torch.softmax(router.proj.weight.double() @ z, 0)
            best = sorted(range(8), key=lambda e: -p.value[e])[:2]
            want = p[best] / p[best].sum() * router.per_expert_scale[best].double()
        assert chosen.tolist() == best
        assert_within_budget("weights", weights_of_row, want)


def test_per_layer_inputs():
    """A norm hides their factor from the logits: it is seen here, against fp64."""
    model = random_model(get_config("gemma4-e-tiny"), seed=3)
    ids = torch.tensor([5, 7, 258])
    x = model.embed_tokens(ids)
    got = model.per_layer_inputs(ids, x)
    assert got.shape == (3, 9, 8)
    matrix = model.per_layer_model_projection.weight.double()
    norm = model.per_layer_projection_norm.weight.double()
    for token in range(3):
        for layer in range(9):
            rows = slice(8 * layer, 8 * layer + 8)
            with bounding():
                context = matrix[rows] @ x[token].double() / 8
                context = context / (context.square().mean() + 1e-6).sqrt() * norm
                own = model.embed_tokens_per_layer.weight[ids[token], rows].double() * 8**0.5
                want = (context + own) / 2**0.5
            assert_within_budget("inputs", got[token, layer], want)


def test_per_layer_table_stays_on_the_host():
    model = gemma.Gemma(get_config("gemma-4-e2b"), device="meta", dtype=torch.bfloat16)
    assert model.embed_tokens_per_layer.weight.nbytes == 262144 * 35 * 256 * 2
    assert HostEmbedding.weight_device(torch.device("cuda")) == torch.device("cpu")


def test_shared_layers_run_for_wanted_rows_only():
    """In steps with a chunk: chunks that no token is sampled from, the last ones beside decodes, drafts of several rows."""
    model = random_model(get_config("gemma4-e-tiny"), device=DEVICE)
    owners, seen, counts = model.config.num_kv_owners, [], set()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    run = Recorder(model, drafter=NGramDrafter(3, min_ngram=1), max_num_batched_tokens=40)
    forward = run.engine.runner.forward

    def checked(input_ids, positions, attn, *, logits_rows):
        seen.clear()
        out = forward(input_ids, positions, attn, logits_rows=logits_rows)
        start, wanted = len(input_ids), len(logits_rows)
        is_chunk = start > len(attn.seq_lens)
        shared = (len(model.layers) - owners) * (wanted > 0 or not is_chunk)
        assert seen == [start] * owners + [wanted if is_chunk else start] * shared
        counts.add((is_chunk, min(wanted, 3) if is_chunk else None))
        return out

    run.engine.runner.forward = checked
    ids = [run.add(prompt(n, n), 12) for n in (50, 130, 9)]
    ids.append(run.add([5, 6, 7] * 20, 12))
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert counts >= {(True, 0), (True, 1), (True, 3), (False, None)}
