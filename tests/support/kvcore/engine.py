"""A stand-in engine: it drives a cache as a runner would, on a `Device` that checks every row that a query reads."""

from __future__ import annotations

from collections import Counter

from quire.kvcore import GroupSpec, KVCache, StepPlan
from tests.support.kvcore.device import Device, Request, Text


def groups(*specs: tuple[int, int | None] | GroupSpec) -> list[GroupSpec]:
    """Groups from (block_size, window or None) pairs or specs, named g0, g1, ..."""
    return [
        s
        if isinstance(s, GroupSpec)
        else GroupSpec(f"g{i}", "dense" if s[1] is None else "window", s[0], 4096, s[1])
        for i, s in enumerate(specs)
    ]


class Engine:
    """Drives a `KVCache`.

    Attributes:
        device: memory of the pool.
        tokens: of each request; tests append to it, and take tokens back.
        slots: of each request.
    """

    def __init__(self, specs: list[GroupSpec], **options) -> None:
        self.kv = KVCache(specs, **({"debug": True} | options))
        self.device, self.specs = Device(self.kv, Counter()), self.kv.layout.groups
        self.tokens: dict[object, list[int]] = {}
        self.slots: dict[object, int] = {}
        self._requests: dict[object, Request] = {}

    def computed(self, rid) -> int:
        return int(self.kv.num_computed[self.slots[rid]])

    def admit(self, rid, tokens: list[int], salt: bytes = b""):
        match = self.kv.match(tokens, salt=salt)
        self.start(rid, tokens, match, salt)
        assert self.computed(rid) == match.num_saved_tokens < len(tokens)
        return match

    def start(self, rid, tokens: list[int], match, salt: bytes = b"") -> None:
        """Admit a request with a match."""
        self.slots[rid] = slot = self.kv.admit(rid, match)
        self.tokens[rid] = list(tokens)
        self._requests[rid] = Request(rid, slot, Text(self.tokens[rid], salt), match)

    def _request(self, rid) -> Request:
        """A request with its tokens as they are now."""
        request, tokens = self._requests[rid], self.tokens[rid]
        pairs = enumerate(zip(request.text.tokens, tokens, strict=False))
        request.text.cut(next((i for i, (a, b) in pairs if a != b), len(tokens)))
        request.text.extend(tokens[len(request.text) :])
        request.computed = self.computed(rid)
        return request

    def step(self, counts: dict[object, int], accepted: dict[object, int] | None = None):
        """Compute `counts[rid]` tokens of each request; returns the plan or OutOfPages."""
        kv, device = self.kv, self.device
        plan = kv.plan([self.slots[r] for r in counts], list(counts.values()))
        if not isinstance(plan, StepPlan):
            return plan
        device.wipe_free_pages()
        device.copy(plan.copies)
        requests, ids = [self._request(r) for r in counts], list[int]()
        for i, (r, n) in enumerate(zip(requests, counts.values(), strict=True)):
            device.check(r, plan.state_pages[:, i] if len(plan.state_pages) else None)
            a, b = plan.cu_seqlens_q[i : i + 2].tolist()
            assert plan.positions[a:b].tolist() == list(range(r.computed, r.computed + n))
            assert plan.seq_lens[i] == r.computed + n <= len(r.text)
            ids += r.text.tokens[r.computed :][:n]
        device.write(plan, requests)
        taken = list((accepted or counts).values())
        for r, n in zip(requests, taken, strict=True):
            device.write_waiting(r, r.computed + n)
        held = kv.pool.holds > 0
        copies = kv.commit(plan, ids, None if accepted is None else taken)
        assert not held[copies[:, 1]].any(), "a snapshot that a resume point holds is written over"
        device.copy(copies)
        for rid in accepted or ():  # rejected tokens never happened
            if accepted[rid] < counts[rid]:
                del self.tokens[rid][self.computed(rid) :]
        return plan

    def finish_prompt(self, rid, chunk: int = 64) -> None:
        """Compute the rest of the known tokens in chunks."""
        while self.computed(rid) < len(self.tokens[rid]):
            left = min(chunk, len(self.tokens[rid]) - self.computed(rid))
            (count,) = self.kv.cut([self.slots[rid]], [left]).tolist()
            plan = self.step({rid: count})
            assert isinstance(plan, StepPlan), plan

    def decode(self, rid, tokens: list[int]) -> None:
        for t in tokens:
            self.tokens[rid].append(t)
            assert isinstance(self.step({rid: 1}), StepPlan)

    def release(self, rid) -> list[int]:
        """End a request; returns the tokens that were computed."""
        n = self.computed(rid)
        self.kv.release(rid)
        del self.slots[rid], self._requests[rid]
        return self.tokens.pop(rid)[:n]

    def run(
        self, rid, tokens: list[int], answer: list[int] = (), chunk: int = 64, salt: bytes = b""
    ):
        """A whole request; returns its match."""
        match = self.admit(rid, tokens, salt)
        self.finish_prompt(rid, chunk)
        self.decode(rid, list(answer))
        self.release(rid)
        return match

    def check(self) -> None:
        """Invariants, and that the next step of every request could read what it needs."""
        self.kv.check_invariants()
        self.device.wipe_free_pages()
        for rid in self.slots:
            self.device.check(self._request(rid))
