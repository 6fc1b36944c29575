"""An engine on `quire.kvcore`: chunked prefill beside decodes, prefix hits, preemption, aborts, and
one step in flight.

    python examples/engine.py

The device is fake: rows of its memory are tokens, and its model needs every row that it may see, so
a wrong page gives a wrong answer. Put your runner in its place.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from quire.kvcore import GroupSpec, KVCache, OutOfPages, linear_table

SIZE, WINDOW, VOCAB = 8, 24, 97
GROUPS = [
    GroupSpec("full", "dense", SIZE, 1),
    GroupSpec("local", "window", SIZE, 1, sliding_window=WINDOW),
]


def sampled(context):
    """The model: the token after these, of all of them and of the last WINDOW."""
    return (sum(context) * 31 + sum(context[-WINDOW:]) * 7 + len(context)) % VOCAB


class Device:
    """Your runner: it writes rows to pages, then reads all that it needs from pages."""

    def __init__(self, num_pages, max_requests):
        self.pages = np.full((num_pages, SIZE), -1)  # one pool for all groups; a row is its token
        self.newest = np.zeros(max_requests, dtype=int)  # of each slot, the token sampled last

    def run(self, plan, tables, ids):
        """Launch a step; ids are -1 where only the device knows them."""
        rows = np.repeat(plan.slots, plan.num_new_tokens)
        ids = np.where(ids < 0, self.newest[rows], ids)
        for slots in plan.slot_mapping:  # one for each table
            self.pages.reshape(-1)[slots] = ids
        for i, (slot, length) in enumerate(zip(plan.slots, plan.seq_lens)):
            full, local = (self.pages[table[i]].reshape(-1)[:length] for table in tables)
            context = full.tolist()
            assert local[-WINDOW:].tolist() == context[-WINDOW:] and min(context) >= 0
            self.newest[slot] = sampled(context)
        return self.newest[plan.slots].copy()  # a real one returns a buffer that fills later


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]  # known ones: the prompt, then answers
    limit: int  # tokens of the answer
    prompt_len: int = 0
    pending: int = 0  # sampled on the device, not known here
    slot: int = -1
    admitted: bool = False  # before: it is not counted again


class Engine:
    def __init__(self, num_pages, max_requests=4, budget=48):
        self.kv = KVCache(
            GROUPS,
            num_pages=num_pages,
            max_requests=max_requests,
            max_model_len=512,
            reads="pages",
            debug=True,
        )
        self.device, self.budget = Device(num_pages, max_requests), budget
        self.waiting, self.running, self.done = deque(), [], []
        self.before = None  # the step in flight
        self.computed = self.preemptions = 0

    def add(self, name, prompt, limit):
        self.waiting.append(Request(name, list(prompt), limit, len(prompt)))

    def abort(self, name):
        for request in [r for r in self.running if r.name == name]:
            self.running.remove(request)
            self.kv.release(name)  # what was published stays findable
        self.waiting = deque(r for r in self.waiting if r.name != name)

    def schedule(self):
        """A step of what runs, then of what waits, as far as tokens and pages go: slot -> end."""
        step, left, short = {}, self.budget, False
        for request in self.running[:]:
            if request not in self.running or not left:
                continue  # preempted just now
            done, known = self.computed_of(request), len(request.tokens) + request.pending
            end = min(known, done + left)
            while self.short_of(request.slot, end):
                short = True
                victim = self.running.pop()  # the newest; perhaps this one
                self.preempt(victim)
                if victim is request:
                    break
            else:
                step[request.slot], left = end, left - (end - done)
        while self.waiting and left and not short and self.kv.num_free_slots:
            request = self.waiting[0]
            match = self.kv.match(request.tokens)
            slot = self.kv.admit(request.name, match, resumed=request.admitted)
            request.admitted, done = True, int(self.kv.num_computed[slot])
            end = min(len(request.tokens), done + left)
            if self.short_of(slot, end):
                self.kv.release(request.name, discard=True)
                break
            request.slot, step[slot], left = slot, end, left - (end - done)
            self.running.append(self.waiting.popleft())
        return step

    def computed_of(self, request):
        return int(self.kv.num_computed[request.slot])

    def short_of(self, slot, end):
        """Whether pages lack; else they are reserved."""
        return end > self.kv.room(slot) and isinstance(self.kv.reserve(slot, end), OutOfPages)

    def preempt(self, request):
        self.kv.release(request.name)
        request.pending = 0
        self.waiting.appendleft(request)
        self.preemptions += 1

    def launch(self, step):
        """Run a step with what is known; the device knows the rest."""
        slots, ends = list(step), list(step.values())
        plan = self.kv.arrays(slots, self.kv.num_computed[slots], ends)
        by_slot = {r.slot: r for r in self.running}
        requests = [by_slot[slot] for slot in slots]
        ids = []
        for request, n, end in zip(requests, plan.num_new_tokens, ends):
            known = request.tokens[end - n : end]
            ids += known + [-1] * (n - len(known))
            request.pending += end == len(request.tokens) + request.pending
        tables = [linear_table(self.kv, g, plan) for g in range(len(GROUPS))]
        answers = self.device.run(plan, tables, np.array(ids))
        self.kv.advance(slots, ends)  # queued: later steps may have the pages that windows left
        self.computed += len(ids)
        return plan, requests, answers

    def learn(self, plan, requests, answers):
        """The tokens of a step are here: publish them, and end who is done."""
        each = zip(requests, plan.num_new_tokens.tolist(), plan.seq_lens.tolist(), answers.tolist())
        for request, n, end, token in each:
            if request not in self.running:
                continue  # it has left meanwhile
            self.kv.publish(request.slot, end, request.tokens[end - n : end])
            if end == len(request.tokens):
                request.tokens.append(token)
                request.pending -= 1
                if len(request.tokens) == request.prompt_len + request.limit:
                    self.running.remove(request)
                    self.kv.release(request.name)
                    self.done.append(request)

    def step(self):
        """Launch a step while the one before it is in flight; then learn that one's tokens."""
        step = self.schedule()
        after = self.launch(step) if step else None
        if self.before is not None:
            self.learn(*self.before)
        self.before = after
        self.kv.check_invariants()
        return bool(self.waiting or self.running or self.before)


def alone(prompt, limit):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        tokens.append(sampled(tokens))
    return tokens


for num_pages in (400, 42):
    engine, rng = Engine(num_pages), np.random.default_rng(0)
    system = rng.integers(0, VOCAB, 50).tolist()
    prompts = {f"chat {i}": system + rng.integers(0, VOCAB, 10 + 7 * i).tolist() for i in range(12)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, limit=20)
    steps = 0
    while engine.step():
        steps += 1
        if steps == 9:
            engine.abort("chat 2")
    assert all(r.tokens == alone(prompts[r.name], 20) for r in engine.done)
    stats = engine.kv.stats()
    print(f"{num_pages} pages: {len(engine.done)} right in {steps} steps,", end=" ")
    print(f"{engine.preemptions} preempted; {engine.computed} tokens computed,", end=" ")
    print(f"{stats['hit_tokens']} + {stats['resumed_hit_tokens']} found")
