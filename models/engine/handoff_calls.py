"""Prefixes that go to another engine, and come from one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.kernels import PoolPages
from quire.kvcore import KVCache

from ..transfer.handoff import TIMEOUT, PrefixTransfer
from ..transfer.pool import PoolMemory
from ..transfer.run import HandedOff
from ..transfer.store import Store
from .input_processor import InputProcessor
from .layout import layout
from .request import SamplingParams
from .turns import StepTurns

if TYPE_CHECKING:
    from .config import EngineConfig
    from .memory import MemoryPlan


class HandOffCalls:
    """The part of `Engine` that hands prefixes off, through any `quire.models.transfer.store.Store`.

    Steps go on meanwhile: a hand-off waits for the one that runs when it begins and when it ends.
    """

    model: nn.Module
    kv: KVCache
    pool: Any
    memory: MemoryPlan
    inputs: InputProcessor
    _config: EngineConfig
    _turns: StepTurns

    def export_prefix(
        self,
        prompt_token_ids: Sequence[int],
        store: Store,
        *,
        salt: bytes = b"",
        skip_tokens: int = 0,
        timeout: float = TIMEOUT,
    ) -> HandedOff:
        """Has a store hold what is cached of a prompt: its full-attention blocks, and the windows
        and states at its end.

        Args:
            prompt_token_ids: of a request that was computed, with ``max_tokens=1`` for instance.
            store: where to.
            salt: of that request.
            skip_tokens: of its start, which the other engine has.
            timeout: seconds.

        Returns:
            What was sent; ``num_tokens`` is of the prefix, 0 where nothing is cached.

        Raises:
            ValueError: arguments out of range, or an engine without caching, of several ranks, or
                with another ``tier_dtype`` than "auto".
            quire.models.transfer.store.TransferError: it failed; the other engine finds nothing.
        """
        if (dtype := self._config.tier_dtype) != "auto":
            raise ValueError(
                f"tier_dtype: expected 'auto' to hand a prefix off, got {dtype!r}: the other "
                "engine could not say which of its hits are lossy"
            )
        prompt = self.inputs.check(prompt_token_ids, SamplingParams())
        return self._transfer.send(
            prompt, store, salt=salt, skip_tokens=skip_tokens, timeout=timeout
        )

    def import_prefix(
        self,
        prompt_token_ids: Sequence[int],
        store: Store,
        *,
        salt: bytes = b"",
        num_tokens: int | None = None,
        wait: float = 0.0,
        remove: bool = False,
        timeout: float = TIMEOUT,
    ) -> HandedOff:
        """Has the prefix cache hold what a store has of a prompt: a request with it that is added
        afterwards computes the rest.

        Args:
            prompt_token_ids: of the request.
            store: where from.
            salt: of the request.
            num_tokens: that ``export_prefix`` returned; None = the longest prefix there is.
            wait: seconds for it to come.
            remove: take it out of the store.
            timeout: seconds, without ``wait``.

        Returns:
            What came; ``num_tokens`` is of the hit.

        Raises:
            ValueError: arguments out of range, or an engine without caching or of several ranks.
            quire.kvcore.page_layout.LayoutMismatch: the other engine's pages are of another model,
                dtype or layout; the message names what differs.
            quire.models.transfer.store.TransferError: it failed, and nothing came. A request
                computes its prompt then.
        """
        prompt = self.inputs.check(prompt_token_ids, SamplingParams())
        return self._transfer.receive(
            prompt, store, salt=salt, num_tokens=num_tokens, wait=wait, remove=remove,
            timeout=timeout,
        )  # fmt: skip

    @cached_property
    def _transfer(self) -> PrefixTransfer:
        if self._config.tensor_parallel_size > 1:
            raise ValueError(
                "tensor_parallel_size: expected 1 for a hand-off, got "
                f"{self._config.tensor_parallel_size}: each rank has a part of the pages"
            )
        return PrefixTransfer(
            self.kv,
            PoolMemory(PoolPages(self.pool.tensors)),
            layout(self.model, self.memory, self._config),
            between_steps=self._between_steps,
        )

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        with self._turns.take(), self._turns.lock, torch.cuda.device_of(self.pool.tensors[0]):
            yield
