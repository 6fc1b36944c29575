"""The two processes of a hand-off: one computes prompts, the other goes on with them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM

from .stores import connect

WARM_UP = 40  # tokens


@dataclass(frozen=True)
class Settings:
    """What both processes are told.

    Attributes:
        model: as of `LLM`. prompt: its token ids. max_tokens: of the answer.
        device, dtype: of the model; None = as of `LLM`.
        kind, address: of the store.
        threads: of torch.
    """

    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    device: str | None
    dtype: str | None
    seed: int
    kind: str
    address: str
    threads: int


def prefill(pipe: Connection, settings: Settings) -> None:
    """Computes the prompt and exports it when it is told to; then generates, found in its own cache
    and without one.

    It sends: that it is ready; the report of the export; the answers.
    """
    llm = _load(settings)
    store = connect(settings.kind, settings.address)
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    _generate(llm.engine, settings.prompt, 1)
    seconds = time.perf_counter() - start
    sent = llm.export_prefix(settings.prompt, store)
    pipe.send({"prefill": seconds, **asdict(sent)})
    pipe.recv()
    cold = Engine(llm.model, _config(settings, enable_caching=False))
    _generate(cold, settings.prompt[:WARM_UP], 2)
    pipe.send(
        {
            "own": _generate(llm.engine, settings.prompt, settings.max_tokens),
            "cold": _generate(cold, settings.prompt, settings.max_tokens),
        }
    )
    store.close()


def decode(pipe: Connection, settings: Settings) -> None:
    """Imports the prompt when it is told to, and generates.

    It is sent the tokens of the prefix; it sends: that it is ready; the report of the import and
    the answer.
    """
    llm = _load(settings)
    store = connect(settings.kind, settings.address)
    pipe.send("ready")
    num_tokens = pipe.recv()
    came = llm.import_prefix(settings.prompt, store, num_tokens=num_tokens)
    answer = _generate(llm.engine, settings.prompt, settings.max_tokens)
    pipe.send({**asdict(came), "answer": answer})
    store.close()


def _config(settings: Settings, **more: Any) -> EngineConfig:
    tokens = len(settings.prompt) + settings.max_tokens
    return EngineConfig(max_num_seqs=2, max_model_len=tokens, **more)


def _load(settings: Settings) -> LLM:
    torch.set_num_threads(settings.threads)
    llm = LLM(
        settings.model,
        engine=_config(settings),
        device=settings.device,
        dtype=settings.dtype,
        seed=settings.seed,
    )
    _generate(llm.engine, settings.prompt[::-1][:WARM_UP], 2)
    return llm


def _generate(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    """Token ids, tokens that were found, and seconds to the first token."""
    engine.add_request(prompt, SamplingParams(max_tokens, ignore_eos=True))
    while engine.has_work:
        for output in engine.step().finished:
            return {
                "token_ids": output.token_ids,
                "found": output.num_cached_tokens,
                "ttft": output.ttft,
            }
    raise AssertionError("the request has not ended")
