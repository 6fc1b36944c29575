"""Workloads made here: each is a list of `Request`s, the same for the same seed.

Ids stand for blocks of `BLOCK` tokens. Where a later prompt repeats an answer, the ids of a request go on into its answer.
"""

from __future__ import annotations

import heapq

import numpy as np

from .requests import Request

BLOCK = 16
MAX_BLOCKS = 1 << 24
MILLION = 1 << 20


class _Ids:
    """Fresh ids."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, tokens: int) -> list[int]:
        """Ids for `tokens` tokens, rounded up to whole blocks.

        Raises: ValueError when the workload has too many.
        """
        first, self._next = self._next, self._next + -(-tokens // BLOCK)
        if self._next > MAX_BLOCKS:
            raise ValueError(
                f"workload: expected at most {MAX_BLOCKS * BLOCK} distinct tokens, got more"
            )
        return list(range(first, self._next))


def _turn(arrival: float, session: int, prompt: list[int], answer: list[int]) -> Request:
    ids = np.array(prompt + answer, dtype=np.int64)
    return Request(arrival, session, len(prompt) * BLOCK, len(answer) * BLOCK, ids, BLOCK)


def round_robin(
    *, sessions: int = 16, turns: int = 8, first: int = 8192, user: int = 512, answer: int = 256, gap: float = 4.0
) -> list[Request]:  # fmt: skip
    """Chats that take turns strictly in order; each prompt is the whole conversation so far.

    first, user, answer: tokens of the first prompt, of each later message, of each answer. gap: seconds between requests.
    """
    fresh = _Ids()
    history = [fresh(first) for _ in range(sessions)]
    requests = []
    for turn in range(turns):
        for s in range(sessions):
            if turn:
                history[s] += fresh(user)
            said = fresh(answer)
            requests.append(_turn(len(requests) * gap, s, history[s], said))
            history[s] = history[s] + said
    return requests


def shared_system_prompt(
    *, requests: int = 400, prompts: int = 8, system: int = 4096, user: int = 2048, answer: int = 256, rate: float = 1.0, seed: int = 0
) -> list[Request]:  # fmt: skip
    """Single questions behind one of a few system prompts, chosen by a Zipf law; questions vary by half around `user` tokens.

    rate: requests a second (Poisson).
    """
    rng = np.random.default_rng(seed)
    fresh = _Ids()
    systems = [fresh(system) for _ in range(prompts)]
    weights = 1 / np.arange(1, prompts + 1)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    picks = rng.choice(prompts, requests, p=weights / weights.sum())
    sizes = rng.integers(user // 2, user * 3 // 2, requests)
    return [
        _turn(t, i, systems[p] + fresh(int(n)), fresh(answer))
        for i, (t, p, n) in enumerate(zip(arrivals.tolist(), picks.tolist(), sizes, strict=True))
    ]


def agent_tree(
    *, trees: int = 24, depth: int = 6, branches: int = 3, root: int = 6144, step: int = 1024, answer: int = 256, gap: float = 2.0, seed: int = 0
) -> list[Request]:  # fmt: skip
    """Agents that explore: each step continues one of the tree's last `branches` open contexts, tool output and answer appended.

    trees: agents, whose steps interleave at random; all start with one shared prompt of `root` // 2 tokens. depth: steps for each branch.
    """
    rng = np.random.default_rng(seed)
    fresh = _Ids()
    shared = fresh(root // 2)
    contexts = [[shared + fresh(root // 2)] for _ in range(trees)]
    left = [depth * branches] * trees
    requests = []
    while any(left):
        tree = int(rng.choice([t for t in range(trees) if left[t]]))
        left[tree] -= 1
        open_ones = contexts[tree][-branches:]
        prompt = open_ones[int(rng.integers(len(open_ones)))] + fresh(
            int(rng.integers(step // 2, step * 2))
        )
        said = fresh(answer)
        requests.append(_turn(len(requests) * gap, tree, prompt, said))
        contexts[tree].append(prompt + said)
    return requests


def agent_pauses(
    *, agents: int = 96, steps: int = 16, branches: int = 3, fork: float = 0.2, root: int = 8192, step: int = 1024,
    answer: int = 256, pause: float = 20.0, spread: float = 1.2, rate: float = 0.25, seed: int = 0
) -> list[Request]:  # fmt: skip
    """Agents that wait for their tools between steps, and now and then go on in several branches.

    Each step's prompt is that of the step before, its answer, and what the tool said. It comes when the answer would end at 50
    tokens a second, and a pause after that.

    agents: that start at `rate` a second (Poisson); all begin with one shared prompt of `root` // 2 tokens. steps: of one agent, all
    branches together. fork: how likely a step goes on in `branches` contexts at once, each with a pause of its own. step: tokens of a
    tool's output, from half to twice. pause: seconds, the median; spread: sigma of its logarithm (log-normal).
    """
    rng = np.random.default_rng(seed)
    fresh = _Ids()
    shared = fresh(root // 2)
    requests = []
    for agent, start in enumerate(np.cumsum(rng.exponential(1 / rate, agents)).tolist()):
        waiting = [(start, 0, shared + fresh(root // 2))]
        made = 1
        for _ in range(steps):
            now, _, prompt = heapq.heappop(waiting)
            said = fresh(answer)
            requests.append(_turn(now, agent, prompt, said))
            for _ in range(branches if rng.random() < fork else 1):
                wait = answer / 50 + pause * float(np.exp(spread * rng.standard_normal()))
                output = fresh(int(rng.integers(step // 2, step * 2)))
                heapq.heappush(waiting, (now + wait, made, prompt + said + output))
                made += 1
    return sorted(requests, key=lambda r: r.arrival)


def million_token_prompts(*, prompts: int = 14, tokens: int = MILLION) -> list[Request]:
    """PR 43447's experiment: long prompts one after another, then look-ups of each at 10, 20, .. 100 % of its length."""
    fresh = _Ids()
    contents = [fresh(tokens) for _ in range(prompts)]
    requests = [_turn(float(i), i, ids, fresh(1)) for i, ids in enumerate(contents)]
    for s, ids in enumerate(contents):
        for tenth in range(1, 11):
            size = tokens * tenth // 10
            part = np.array(ids[: -(-size // BLOCK)], dtype=np.int64)
            requests.append(Request(float(prompts + s), s, size, 0, part, BLOCK))
    return requests


def prefix_sweep(
    *, prefixes: int = 30, requests: int = 300, prefix: int = 27_648, user: int = 384, answer: int = 128, rate: float = 1.0, seed: int = 0
) -> list[Request]:  # fmt: skip
    """PR 40676's sweep: prompts of about 28k tokens that start with one of `prefixes` long prefixes, each as likely."""
    rng = np.random.default_rng(seed)
    fresh = _Ids()
    starts = [fresh(prefix) for _ in range(prefixes)]
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    picks = rng.integers(prefixes, size=requests)
    return [
        _turn(t, i, starts[p] + fresh(user), fresh(answer))
        for i, (t, p) in enumerate(zip(arrivals.tolist(), picks.tolist(), strict=True))
    ]


GENERATORS = {
    "round-robin": round_robin,
    "system-prompt": shared_system_prompt,
    "agent-tree": agent_tree,
    "agent-pauses": agent_pauses,
    "pr43447": million_token_prompts,
    "pr40676": prefix_sweep,
}
