"""A small engine for DeepSeek-V4: `quire.kvcore` plans, the paged model runs, kvcore commits. Whatever nobody owns is NaN.

Greedy verification of given drafts, and the drafter layer after each step, on one batch at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.kvcore import KVCache, StepPlan
from quire.kvcore.device import AttnMetadata
from quire.models.deepseek_v4.attention import PagedAttend
from quire.models.deepseek_v4.cache import CacheFormat, V4PagePool, plan_cache
from quire.models.deepseek_v4.model import DeepseekV4
from quire.models.deepseek_v4.mtp import chain_drafts

NAN = 255  # as bytes: NaN in fp32, bf16 and e4m3


class SmallEngine:
    """Requests by name. fmt: of the cache; default: plain rows of the model's dtype. impl: of the kernels."""

    def __init__(
        self, model: DeepseekV4, *, fmt: CacheFormat | None = None, drafters: bool = False,
        max_draft_tokens: int = 0, num_pages: int = 400, max_requests: int = 4, max_model_len: int = 1024,
        retention="latest", caching: bool = True, impl: str = "torch",
    ) -> None:  # fmt: skip
        self.model, self.drafters, self.impl = model, drafters, impl
        plan = plan_cache(model.config, fmt or CacheFormat(model.dtype), drafters=drafters)
        self.groups = plan.groups
        self.pool = V4PagePool(
            model.config, plan, num_pages=num_pages, max_requests=max_requests,
            max_draft_tokens=max_draft_tokens,
        )  # fmt: skip
        self.kv = KVCache(
            plan.groups, num_pages=num_pages, max_requests=max_requests, max_model_len=max_model_len,
            max_draft_tokens=max_draft_tokens, retention=retention, enable_caching=caching,
        )  # fmt: skip
        self.pool.data.fill_(NAN)
        for ring in self.pool.rings:
            ring.fill_(float("nan"))
        self.tokens: dict[str, list[int]] = {}
        self.slots: dict[str, int] = {}

    def admit(self, name: str, tokens: Tensor) -> int:
        """Starts a request; returns how many tokens its hit covers."""
        self.tokens[name] = tokens.tolist()
        match = self.kv.match(self.tokens[name])
        self.slots[name] = self.kv.admit(name, match)
        return self.computed(name)

    def computed(self, name: str) -> int:
        return int(self.kv.num_computed[self.slots[name]])

    def release(self, name: str) -> None:
        self.kv.release(name)
        del self.slots[name], self.tokens[name]
        self._check()

    def step(
        self, counts: Mapping[str, int], *, drafts: Mapping[str, list[int]] | None = None
    ) -> dict[str, Tensor]:
        """Computes ``counts`` tokens of each request; returns the logits of their rows.

        drafts: guesses that follow the counted tokens of a request; those that greedy decoding agrees with become its tokens, and so
        does the token after them.
        """
        drafts = dict(drafts or {})
        names = sorted(counts, key=lambda n: counts[n] + len(drafts.get(n, [])) != 1)
        slots = [self.slots[name] for name in names]
        tokens = []
        for name in names:
            start = self.computed(name)
            tokens.append(
                self.tokens[name][start : start + counts[name]] + list(drafts.get(name, []))
            )
        plan = self.kv.plan(slots, [len(row) for row in tokens])
        assert isinstance(plan, StepPlan), plan
        logits, self.draft_logits = self._forward(plan, names, tokens, drafts)
        accepted = [len(t) for t in tokens]
        for i, name in enumerate(names):
            if name in drafts:
                accepted[i] = self._verify(name, logits[name], drafts[name], counts[name])
        self.kv.commit(plan, [token for row in tokens for token in row], accepted)
        self._check()
        return logits

    def run(self, name: str, upto: int, chunk: int = 10**6) -> Tensor:
        """Logits of a request's tokens from the first not computed up to ``upto``, in steps of ``chunk`` tokens; draft_logits too."""
        parts, drafted = [], []
        while (done := self.computed(name)) < upto:
            parts.append(self.step({name: min(chunk, upto - done)})[name])
            drafted += self.draft_logits.values()
        self.draft_logits = {name: torch.cat(drafted)} if drafted else {}
        return torch.cat(parts)

    def chain(self, rows: Mapping[str, int], num_drafts: int) -> dict[str, list[int]]:
        """Drafts of requests from one row each of the last step, the one that their last token follows."""
        slots = np.array([self.slots[name] for name in rows])
        drafts = chain_drafts(
            self.model,
            torch.stack([self.draft_rows[name][row][None] for name, row in rows.items()]),
            torch.from_numpy(self.kv.num_computed[slots].astype(np.int32)),
            tuple(torch.from_numpy(self.kv.table(g)[slots]) for g in range(len(self.groups))),
            torch.from_numpy(slots.astype(np.int32)),
            self.pool,
            num_drafts=num_drafts,
            max_seq_len=int(self.kv.num_computed[slots].max()),
            impl=self.impl,
        )
        return dict(zip(rows, drafts.tolist(), strict=True))

    @torch.inference_mode()
    def _forward(self, plan, names, tokens, drafts):
        attn = self._metadata(plan)
        step = PagedAttend(attn, self.pool, impl=self.impl)
        ids = torch.tensor([token for row in tokens for token in row])
        positions = torch.from_numpy(plan.positions)
        streams = self.model.streams(ids, positions, step)
        sizes = [len(row) for row in tokens]
        logits = dict(zip(names, self.model.logits(streams).split(sizes), strict=True))
        if not self.drafters:
            return logits, {}
        after = []
        for name, row in zip(names, tokens, strict=True):
            greedy = logits[name].argmax(-1).tolist()
            start = self.computed(name)
            known = self.tokens[name][start + 1 : start + 1 + len(row)]
            # A row's next token: what the request has, else what was decided after it (drafts agree as far as they count).
            after += known + greedy[len(known) :]
        out = self.model.draft_streams(0, streams, torch.tensor(after), positions, step)
        self.draft_rows = dict(zip(names, out.split(sizes), strict=True))
        drafted = self.model.draft_logits(0, out).split(sizes)
        return logits, dict(zip(names, drafted, strict=True))

    def _metadata(self, plan: StepPlan) -> AttnMetadata:
        tables = []
        for group in range(len(self.groups)):
            tables.append(torch.from_numpy(self.kv.table(group)[plan.slots].copy()))
        counts = plan.num_new_tokens
        return AttnMetadata(
            cu_seqlens_q=torch.from_numpy(plan.cu_seqlens_q.copy()),
            seq_lens=torch.from_numpy(plan.seq_lens.copy()),
            block_tables=tuple(tables),
            slot_mappings=tuple(torch.from_numpy(plan.slot_mapping.copy())),
            max_seqlen_q=int(counts.max()),
            max_seq_len=int(plan.seq_lens.max()),
            num_decodes=int((counts == 1).sum()),
            request_slots=torch.from_numpy(plan.slots.astype(np.int32)),
        )

    def _verify(self, name: str, logits: Tensor, drafts: list[int], count: int) -> int:
        greedy = logits.argmax(-1).tolist()
        agreed = 0
        while agreed < len(drafts) and greedy[count - 1 + agreed] == drafts[agreed]:
            agreed += 1
        self.tokens[name] += [*drafts[:agreed], greedy[count - 1 + agreed]]
        return count + agreed

    def _check(self) -> None:
        self.kv.check_invariants()
        self.pool.data[torch.from_numpy(self.kv.pool.free_pages().astype(np.int64))] = NAN
        idle = [slot for slot in range(self.kv.max_requests + 1) if slot not in self.slots.values()]
        for ring in self.pool.rings:
            ring[idle] = float("nan")
