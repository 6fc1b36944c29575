"""Layers that share the keys of an earlier layer, in pages and without."""

import torch

from quire.models.layers.shared_layers import SharedAttend
from quire.models.layers.unpaged_attention import UnpagedAttend
from tests.models.engine.test_engine import Recorder, build, prompt


def test_sinks_count_in_a_prefill_of_the_rows_with_logits(monkeypatch):
    for kind in (SharedAttend, UnpagedAttend):

        def with_sinks(self, layer, q, k=None, v=None, *, attend=kind.__call__, **_):
            sinks = torch.full(q.shape[1:2], 2.0, device=q.device) if k is None else None
            return attend(self, layer, q, k, v, sinks=sinks)

        monkeypatch.setattr(kind, "__call__", with_sinks)
    run = Recorder(build("gemma4-e-tiny"))
    request_id = run.add(prompt(60), 3)
    run.run()
    run.check(request_id)
