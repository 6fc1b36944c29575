"""Each copy of an engine's host tier fails in turn."""

import pytest
import torch

from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.host_tier import PageCopier
from tests.models.engine.test_engine_many import alone
from tests.models.engine.test_tiering import (
    GIB_OF_A_PAGE,
    PARAMS,
    finish,
    recount,
    tiered,
)
from tests.support.models.toy import ToyModel

PROMPTS = [[3 + (n + 7 * user) % 50 for n in range(70 + 5 * user)] for user in range(4)]
FAILURES = ("before", "half")


class FaultAt:
    """One copy fails, counted from 0: before it does anything, or after half of it."""

    def __init__(self, monkeypatch, number=None, how="before"):
        self.calls, self.number, self.how = [], number, how
        monkeypatch.setattr(PageCopier, "_copy", self._faulty(PageCopier._copy))

    def _faulty(self, work):
        def copy(this, direction, pages, rows):
            self.calls.append(direction)
            if len(self.calls) - 1 != self.number:
                return work(this, direction, pages, rows)
            if self.how == "half":
                n = len(pages) // 2
                work(this, direction, pages[:n], rows[:n])
            raise torch.OutOfMemoryError("copy")

        return copy


def life(model, is_async):
    """Four users take turns in a pool that is too small for three of them, over host memory. Each output is checked."""
    settings = {
        "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_pages": 20, "host_cache_gib": 60 * GIB_OF_A_PAGE,
        "async_scheduling": is_async,
    }  # fmt: skip
    engine = Engine(model, EngineConfig(**settings))
    for turn in range(10):
        for tokens in PROMPTS:
            tokens = [*tokens, *[turn] * turn]
            request_id = engine.add_request(tokens, PARAMS)
            output = finish(engine)[request_id]
            assert output.token_ids == alone(model, tokens, PARAMS)
            engine.pool.poison(engine.kv.pool.free_pages())
    engine.tiers.settle()
    recount(engine)
    engine.close()


@pytest.mark.parametrize("budget", [24])
@pytest.mark.parametrize("how", FAILURES)
def test_each_call_fails_in_turn(how, budget, monkeypatch):
    """Some of them in an ordinary run. Outputs are those without tiers, and all pages are accounted for."""
    model = tiered(ToyModel())
    with monkeypatch.context() as patch:
        seen = FaultAt(patch)
        life(model, is_async=False)
    assert {*seen.calls} == {"to_host", "to_device"} and len(seen.calls) > 40
    numbers, reached = range(7 * FAILURES.index(how), len(seen.calls), budget), []
    for number in numbers:
        with monkeypatch.context() as patch:
            fault = FaultAt(patch, number, how)
            life(model, is_async=bool(number % 2))
        reached += fault.calls[number : number + 1]
    assert len(reached) > len(numbers) / 2
