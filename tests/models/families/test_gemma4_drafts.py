"""A Gemma-4 assistant in the engine with random weights; `test_gemma4_assistant` has its values, where transformers is new enough."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from quire.models.config.hf import to_hf
from quire.models.config.model import FULL, SLIDING
from quire.models.families.gemma4_assistant import Assistant, AssistantKeys, Gemma4Drafter
from quire.models.llm import make_drafter
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.support.models.few import few


class Knowing(Gemma4Drafter):
    """Drafts as the assistant does, but now and then it knows the outputs."""

    outputs, seen = {}, 0

    def propose(self, requests):
        drafts = super().propose(requests)
        for request, own in zip(requests, drafts, strict=True):
            self.seen += 1
            known = self.outputs.get(request.request_id, ())[request.num_output :]
            known = torch.tensor(known[: min(len(own), self.seen % 4)], dtype=own.dtype)
            own[: len(known)] = known
        return drafts


@pytest.mark.parametrize("is_ordered", [False, True])
def test_outputs_do_not_depend_on_drafts(is_ordered, tmp_path):
    model = random_model(few("gemma4-tiny"), device=DEVICE)
    config = replace(model.config, hidden_size=32, layer_types=(SLIDING, FULL), vocab_size=259)
    keys = AssistantKeys(
        backbone_hidden_size=model.config.hidden_size, use_ordered_embeddings=is_ordered,
        num_centroids=7, centroid_intermediate_top_k=2,
    )  # fmt: skip
    assistant = Assistant(keys, config, device=torch.device(DEVICE), dtype=torch.float32)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for weight in assistant.parameters():
        if weight.is_floating_point():
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        else:
            weight.copy_(torch.randperm(len(weight), generator=generator, device=DEVICE))

    weights = dict(assistant.named_parameters())
    stored = {n if "projection" in n else f"model.{n}": w for n, w in weights.items()}
    save_file(stored, tmp_path / "model.safetensors")
    whole = {"model_type": "gemma4_assistant", "text_config": to_hf(config)} | vars(keys)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    read = make_drafter(str(tmp_path), 3, model).assistant
    assert all(torch.equal(weights[n], w) for n, w in read.named_parameters())
    with pytest.raises(ValueError, match=r"drafter: expected one of .*or a directory, got 'none'"):
        make_drafter("none", 3, None)

    def work(drafter):
        run = Recorder(model, drafter=drafter, max_num_batched_tokens=23)
        ids = [run.add(prompt(n, n), 14) for n in (1, 17, 40)]
        ids.append(run.add(prompt(17, 17), 14, sampling={"temperature": 0.8, "seed": 2}))
        run.run()
        return run, {i: run.check(i).token_ids for i in ids}

    _, plain = work(None)
    drafter = Knowing(model, read, 3)
    drafter.outputs = plain
    run, drafted = work(drafter)
    assert drafted == plain
    assert 0 < run.engine.totals.num_accepted < run.engine.totals.num_drafts
