"""Calls that must be refused and leave no trace: wrong arguments, stale plans, plans of another cache."""

from __future__ import annotations

from quire.kvcore import GroupSpec, KVCache, StepPlan, linear_table, paged_rows
from tests.support.kvcore.digest import digest


class Misuse:
    """Steps of a life that misuse its cache; a part of `shadow.Life`."""

    def fails(self, name: str, *args, error=(ValueError, TypeError), **kwargs) -> None:
        """The call raises `error`."""
        try:
            self.call(name, *args, **kwargs)
        except error:
            self.calls["refused"] += 1
            return
        raise AssertionError(f"{name} was accepted with {args} {kwargs}"[:300])

    def _plan_one(self) -> StepPlan | None:
        """A plan of some requests."""
        room = [r for r in self.requests if r.computed < self.kv.max_model_len]
        if not room:
            return None
        some = self.rng.sample(room, self.rng.randint(1, len(room)))
        counts = [self.rng.randint(1, min(40, self.kv.max_model_len - r.computed)) for r in some]
        plan = self.call("plan", [r.slot for r in some], counts)
        return plan if isinstance(plan, StepPlan) else None

    def stale_plan(self) -> None:
        """After a plan something else happens: the plan is refused, and the newest one is still good."""
        old = self._plan_one()
        if old is None:
            return
        newer = None
        ways = ["plan", "plan", "commit", "release", "evict", "clear", "rollback"]
        way = self.rng.choice(ways + ["admit"] * (self.kv.num_free_slots > 0))
        before = digest(self.kv)
        if way == "plan":
            newer = self._plan_one()
        elif way == "commit":
            self._commit_anything(old)
        elif way == "evict":
            self.call("evict", self.kv.num_pages)
        else:
            getattr(self, way)()
        if newer is None and digest(self.kv) == before:
            return
        before = digest(self.kv)
        self.fails("commit", old, [0] * len(old.positions))
        assert digest(self.kv) == before, f"a refused plan, after {way}, left traces"
        if newer is not None:
            self._commit_anything(newer)

    def _commit_anything(self, plan: StepPlan) -> None:
        """Commit a plan with the tokens that the texts have, or any."""
        by_slot = {r.slot: r for r in self.requests}
        counts = {}
        for slot, n in zip(plan.slots.tolist(), plan.num_new_tokens.tolist(), strict=True):
            r = by_slot[slot]
            r.text.extend([self.rng.randint(0, 1) for _ in range(r.computed + n - len(r.text))])
            counts[r] = n
        self.finish_step(plan, counts, None)

    def foreign_plan(self) -> None:
        """A plan of another cache that is just like this one."""
        if not self.requests:
            return
        r = self.rng.choice(self.requests)
        if r.computed == self.kv.max_model_len:
            return
        other = KVCache(self.specs, **self.options)
        other.admit("x", other.match(r.text.tokens[: r.computed] or [0]))
        plan = self.call("plan", [r.slot], [1])
        if not isinstance(plan, StepPlan):
            return
        while getattr(other, "_version", 0) < getattr(self.kv, "_version", 0):
            other.evict(0)
        foreign = other.plan([other.slot_of("x")], [1])
        before = digest(self.kv)
        self.fails("commit", foreign, [0])
        assert digest(self.kv) == before, "a plan of another cache left traces"
        self._commit_anything(plan)

    def wrong_arguments(self) -> None:
        """Some calls with wrong arguments; the digest of everything stays."""
        kv, rng = self.kv, self.rng
        text = self.new_text()
        match = self.call("match", text.tokens, salt=text.salt)
        plan = self._plan_one()
        good = [r.slot for r in self.requests] or [0]
        idle = [s for s in range(kv.max_requests) if s not in good]
        long = kv.max_model_len + 1
        shape = [GroupSpec("other", "dense", kv.alignment + 1, 4096)]
        other = KVCache(shape, num_pages=9, max_requests=1, max_model_len=99).match([1, 2, 3])
        wrong = [
            ("match", []), ("match", [-1]), ("match", [2**31]), ("match", [0.5]), ("match", [[1, 2]]), ("match", None),
            ("match", [0] * long), ("match", other.prompt), ("match", text.tokens, {"salt": "text"}),
            ("match", match.prompt, {"salt": text.salt + b"other"}),
            ("match", match.prompt, {"extra_keys": [(0, 1, b"other")]}), ("match", text.tokens, {"extra_keys": 1}),
            ("match", text.tokens, {"extra_keys": [(0, 1)]}), ("match", text.tokens, {"extra_keys": [(0, 1, "text")]}),
            ("match", text.tokens, {"extra_keys": [(1, 1, b"")]}), ("match", text.tokens, {"extra_keys": [(-1, 1, b"")]}),
            ("match", text.tokens, {"extra_keys": [(0, len(text) + 1, b"")]}), ("match", text.tokens, {"extra_keys": [(len(text), None, b"")]}),
            ("match", text.tokens, {"max_tokens": -1}), ("match", text.tokens, {"max_tokens": 1.0}),
            ("release", "unknown", {"discard": True}),
            ("evict_pages", [0]), ("evict_pages", [kv.num_pages]), ("evict_pages", [1.0]), ("evict_pages", [[1]]), ("evict_pages", None),
            ("admit", "new", None), ("admit", "new", other), ("admit", [], match), ("admit", "new", match.prompt),
            ("plan", [], []), ("plan", good, [1] * (len(good) + 1)), ("plan", [kv.max_requests], [1]),
            ("plan", [-1], [1]), ("plan", [good[0]] * 2, [1, 1]), ("plan", good, [0] * len(good)),
            ("plan", good, [-3] * len(good)), ("plan", good, [0.5] * len(good)), ("plan", good, [long] * len(good)),
            ("plan", [[good[0]]], [[1]]), ("plan", "0", [1]), ("plan", good, [2**62] * len(good)),
            ("needed", [-1], [1]), ("needed", good, [0] * len(good)), ("needed", good, [long] * len(good)), ("needed", [], []),
            ("cut", [kv.max_requests], [1]), ("cut", good, [0] * len(good)), ("cut", [], []),
            ("commit", None, [0]), ("commit", match, [0]),
            ("room", kv.max_requests), ("num_published", -1), ("pages_of", good[0]), ("match", text.tokens, {"keys": b"", "num_tokens": 9}),
            ("match", {"keys": b"k", "num_tokens": 9}), ("match", {"keys": b"k" * 96, "num_tokens": 1}), ("match", {"keys": b""}),
            ("reserve", -1, 1), ("reserve", good[0], long), ("reserve", good, [long] * len(good)), ("reserve", [good[0]] * 2, [1, 1]),
            ("reserve", good, [0.5] * len(good)), ("reserve", good[0], None), ("arrays", good[0], long, long + 1), ("arrays", good, [1], [1, 2, 3, 4, 5, 6]),
            ("arrays", good[0], 0, 0), ("advance", good[0], long), ("advance", good[0], 1, {"oldest_query": 0}), ("advance", -1, 1),
            ("publish", -1, 1), ("publish", good[0], 1, {"keys": b"k"}), ("publish", [good[0]] * 2, [0, 0]),
            ("rollback", kv.max_requests, 1), ("rollback", -1, 1), ("rollback", good[0], 0), ("rollback", good[0], long),
            ("rollback", good[0], True), ("rollback", good[0], 1.0), ("release", "unknown"), ("release", []),
            ("slot_of", "unknown"), ("lowest_rollback", kv.max_requests),
            ("pin", match, {"now": 0.0, "ttl": 0.0}), ("pin", match, {"now": float("nan"), "ttl": 1.0}),
            ("pin", None, {"now": 0.0, "ttl": 1.0}), ("pin_request", "unknown", {"now": 0.0, "ttl": 1.0}),
            ("pin", match, {"now": 0.0, "ttl": float("nan")}), ("unpin", None), ("unpin", other),
            ("expire_pins", float("nan")), ("expire_pins", None), ("evict", -1), ("evict", 0.5), ("evict", None),
            ("table", len(self.specs)), ("table", 0, 9),
        ]  # fmt: skip
        wrong += [("plan", [s], [1]) for s in idle] + [("rollback", s, 1) for s in idle]
        wrong += [("admit", r.rid, match) for r in self.requests]
        wrong += [("reset", {"end_requests": 0})] * bool(self.requests)
        wrong += [("publish", good[0], long), ("publish", good[0], 0, [1])] * kv.enable_caching
        if not idle:
            wrong.append(("admit", "one too many", match))
        if self.log is None:
            wrong.append(("announce",))
        if plan is not None:
            n, most = len(plan.positions), plan.num_new_tokens
            ids = [0] * n
            wrong += [
                ("commit", plan, ids[1:]), ("commit", plan, [*ids, 0]), ("commit", plan, [0.5] * n),
                ("commit", plan, [-1] * n), ("commit", plan, [2**31] * n), ("commit", plan, [ids]),
                ("commit", plan, ids, most + 1), ("commit", plan, ids, most * 0), ("commit", plan, ids, most[1:]),
                ("commit", plan, ids, most * 0.5), ("commit", plan, ids, most - kv.max_draft_tokens - 1),
            ]  # fmt: skip
        some = rng.sample(wrong, 8)
        before = digest(kv)
        for name, *args in some:
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
            self.fails(name, *args, **kwargs)
        self._wrong_functions(idle)
        assert digest(kv) == before, f"one of {[str(w)[:60] for w in some]} left traces"
        if plan is not None and rng.random() < 0.5:
            self._commit_anything(plan)

    def _wrong_functions(self, idle: list[int]) -> None:
        """Exports of what is not there, and a policy of two caches."""
        kv = self.kv
        groups, busy = kv.layout.groups, {**self.options, "policy": self.policy}
        states = [g for g, spec in enumerate(groups) if spec.kind == "state"]
        wrong = [(len(groups), []), (0, [kv.max_requests]), *((g, []) for g in states)]
        wrong += [(0, [slot]) for slot in idle]
        calls = [(form, kv, *args) for args in wrong for form in (linear_table, paged_rows)]
        calls.append((lambda: KVCache(self.specs, **busy),))  # a policy that another cache has
        for call, *args in calls:
            try:
                call(*args)
            except ValueError:
                self.calls["refused"] += 1
                continue
            raise AssertionError(f"{call.__name__} was accepted with {args[1:]}"[:300])
