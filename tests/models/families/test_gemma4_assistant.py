"""Gemma-4's assistant as a drafter, beside transformers' model of it (a first round over the keys and values of one pass)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models.config.named import get_config
from quire.models.families.gemma4_assistant import Gemma4Drafter, load_assistant
from quire.models.llm import make_drafter
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.models.engine.test_engine import Recorder, prompt
from tests.support.models.drafters import Watched

# 5.23 refuses its own assistants' configurations.
transformers = pytest.importorskip("transformers", minversion="5.24")

NUM_DRAFTS = 3
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
SHAPES = {
    "vocab_size": 272, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "num_global_key_value_heads": 2, "sliding_window": 8,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 512,
}  # fmt: skip


def saved(model, path, seed):
    """transformers' model with random weights, and its directory."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    for name, weight in (parameters | dict(model.named_buffers())).items():
        if name.endswith("layer_scalar"):
            weight.data.fill_(0.8)
        elif name.endswith("token_ordering"):
            weight.data.copy_(torch.randperm(len(weight), generator=generator))
        elif name in parameters:
            new = torch.randn(weight.shape, generator=generator)
            scaled = new / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 1 + 0.3 * new
            weight.data.copy_(scaled)
    model.tie_weights()
    model.save_pretrained(path)
    return model.eval(), path


@pytest.fixture(scope="module", params=[0, 3], ids=["own keys", "shared keys"])
def target(request, tmp_path_factory):
    config = transformers.Gemma4TextConfig(
        **SHAPES, hidden_size=64, intermediate_size=96, num_hidden_layers=6, layer_types=KINDS * 2,
        num_kv_shared_layers=request.param, final_logit_softcapping=None, eos_token_id=None,
    )  # fmt: skip
    return saved(transformers.Gemma4ForCausalLM(config), tmp_path_factory.mktemp("target"), 0)


@pytest.fixture(scope="module", params=[False, True], ids=["head", "clusters"])
def assistant(request, tmp_path_factory):
    text = transformers.Gemma4TextConfig(
        **SHAPES, hidden_size=32, intermediate_size=48, num_hidden_layers=3, layer_types=KINDS,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=64, use_ordered_embeddings=request.param,
        num_centroids=16, centroid_intermediate_top_k=4,
    )  # fmt: skip
    model = transformers.Gemma4AssistantForCausalLM(config)
    return saved(model, tmp_path_factory.mktemp("assistant"), 1)


@torch.no_grad()
def oracle(target, assistant, tokens):
    """Greedy drafts behind tokens, of which the last one is not computed yet."""
    out = target(
        torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
    )
    hidden, token, drafts = out.hidden_states[-1][:, -1:], tokens[-1], []
    embed = target.get_input_embeddings()
    for _ in range(NUM_DRAFTS):
        inputs = torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1)
        step = assistant(
            inputs_embeds=inputs,
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=out.shared_kv_states,
        )
        hidden, token = step.last_hidden_state, int(step.logits[0, -1].argmax())
        drafts.append(token)
    return drafts


class WatchedAssistant(Watched, Gemma4Drafter):
    """Keeps its drafts."""


def make(target, assistant=None, **settings):
    """(engine's recorder, drafter)."""
    model, drafter = load_model(target[1], dtype=torch.float32), None
    if assistant is not None:
        own = load_assistant(assistant[1], dtype=torch.float32)
        drafter = WatchedAssistant(model, own, NUM_DRAFTS)
    return Recorder(model, drafter=drafter, max_num_batched_tokens=23, **settings), drafter


def work(run):
    """Outputs of requests that share a prefix, in chunks, the last from a hit."""
    base, ids = prompt(60), []
    for length in (1, 7, 8, 9, 10, 41, 60, 60):
        ids.append(run.add(base[:length], 9))
        if length == 60:
            run.run()
    return [run.check(i) for i in ids]


def test_drafts_are_those_of_transformers(target, assistant):
    """Around a window of 8, in ragged batches, in chunks, behind a hit, with drafts accepted and rejected."""
    plain = [output.token_ids for output in work(make(target)[0])]
    run, drafter = make(target, assistant)
    drafter.outputs = {str(i): tokens for i, tokens in enumerate(plain)}
    outputs = work(run)
    assert [output.token_ids for output in outputs] == plain
    assert outputs[-1].num_cached_tokens >= 32
    totals = run.engine.totals
    assert 0 < totals.num_accepted < totals.num_drafts and len(drafter.seen) > 20
    for tokens, drafts in drafter.seen:
        assert drafts == oracle(target[0], assistant[0], tokens)[: len(drafts)]


@pytest.mark.parametrize(("target", "assistant"), [(0, False), (3, True)], indirect=True)
def test_a_preempted_request_drafts_as_before(target, assistant):
    run, drafter = make(target, assistant, num_pages=30, max_model_len=75)
    ids = [run.add(prompt(41 + n, n), 30) for n in range(6)]
    run.run()
    assert sum(run.check(i).num_preemptions for i in ids) > 0
    for tokens, drafts in drafter.seen[-12:]:
        assert drafts == oracle(target[0], assistant[0], tokens)[: len(drafts)]


@pytest.mark.parametrize(("target", "assistant"), [(0, True)], indirect=True)
def test_what_is_refused(target, assistant, tmp_path):
    path = assistant[1]
    own = load_assistant(path, dtype=torch.float32)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())  # fmt: skip
    for name in ("tensors", "clusters"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        config["num_centroids"] = 19
    del tensors["pre_projection.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, tmp_path / "tensors" / "model.safetensors")
    model = load_model(target[1], dtype=torch.float32)
    assert isinstance(make_drafter(str(path), 3, model), Gemma4Drafter)
    for call, error, message in (
        (lambda: make_drafter("none", 3, None), ValueError,
            r"drafter: expected one of .*or a directory, got 'none'"),
        (lambda: Gemma4Drafter(random_model(get_config("llama-tiny")), own), ValueError,
            "drafter: expected a target with family 'gemma4'"),
        (lambda: Gemma4Drafter(random_model(get_config("gemma4-small")), own), ValueError,
            "drafter: expected a target with hidden_size 64"),
        (lambda: load_assistant(target[1]), NotImplementedError,
            "model_type: supported as a drafter is"),
        (lambda: load_assistant(tmp_path / "tensors"), ValueError,
            r"missing .*pre_projection.*misshaped .*norm\.weight"),
        (lambda: load_assistant(tmp_path / "clusters"), ValueError,
            "num_centroids: expected a divisor of vocab_size=272"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
