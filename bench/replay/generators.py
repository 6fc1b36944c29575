"""Generated workloads: lists of `TraceRequest`s, equal for equal seeds.

Ids stand for blocks of `BLOCK` tokens. Where a later prompt repeats an answer, the ids of a request
go on into its answer. Lengths are in tokens, `gap` and `pause` in seconds, `rate` in arrivals a
second (Poisson).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count, islice

import numpy as np

from ..common.traces import TraceRequest

BLOCK = 16
MAX_BLOCKS = 1 << 24
MILLION = 1 << 20


def _unused() -> Callable[[int], list[int]]:
    """A function: tokens -> unused ids for them, rounded up to whole blocks."""
    counter = count()

    def new_ids(tokens: int) -> list[int]:
        ids = list(islice(counter, min(-(-tokens // BLOCK), MAX_BLOCKS + 1)))
        if ids[-1] >= MAX_BLOCKS:
            most = MAX_BLOCKS * BLOCK
            raise ValueError(f"workload: expected at most {most} distinct tokens, got more")
        return ids

    return new_ids


def _turn(arrival: float, prompt: list[int], answer: list[int]) -> TraceRequest:
    ids = np.array(prompt + answer, dtype=np.int64)
    return TraceRequest(arrival, len(prompt) * BLOCK, len(answer) * BLOCK, ids, BLOCK)


def round_robin(
    *, sessions: int = 16, turns: int = 8, first: int = 8192, user: int = 512,
    answer: int = 256, gap: float = 4.0,
) -> list[TraceRequest]:  # fmt: skip
    """Chats that take turns strictly in order; each prompt is the whole conversation so far.

    Args:
        first, user, answer: lengths of the first prompt, of each later message, of each answer.
        gap: time between requests.
    """
    new_ids = _unused()
    history = [new_ids(first) for _ in range(sessions)]
    requests = []
    for turn in range(turns):
        for s in range(sessions):
            if turn:
                history[s] += new_ids(user)
            said = new_ids(answer)
            requests.append(_turn(len(requests) * gap, history[s], said))
            history[s] = history[s] + said
    return requests


def agent_tree(
    *, trees: int = 24, depth: int = 6, branches: int = 3, root: int = 6144,
    step: int = 1024, answer: int = 256, gap: float = 2.0, seed: int = 0,
) -> list[TraceRequest]:  # fmt: skip
    """Agents that explore: each step goes on from one of the last `branches` contexts of its tree.

    Args:
        trees: agents. Their steps interleave at random, and all start with one shared prompt of
            `root` // 2 tokens.
        depth: steps of each branch.
        step: mean length of what a step adds to the prompt.
        gap: time between requests.
    """
    rng = np.random.default_rng(seed)
    new_ids = _unused()
    shared = new_ids(root // 2)
    contexts = [[shared + new_ids(root // 2)] for _ in range(trees)]
    left = [depth * branches] * trees
    requests = []
    while any(left):
        tree = int(rng.choice([t for t in range(trees) if left[t]]))
        left[tree] -= 1
        last = contexts[tree][-branches:]
        context = last[int(rng.integers(len(last)))]
        prompt = context + new_ids(int(rng.integers(step // 2, step * 2)))
        said = new_ids(answer)
        requests.append(_turn(len(requests) * gap, prompt, said))
        contexts[tree].append(prompt + said)
    return requests


def agent_pauses(
    *, agents: int = 96, steps: int = 16, branches: int = 3, fork: float = 0.2,
    root: int = 8192, step: int = 1024, answer: int = 256, pause: float = 20.0,
    spread: float = 1.2, rate: float = 0.25, seed: int = 0,
) -> list[TraceRequest]:  # fmt: skip
    """Agents that wait for their tools between steps, and sometimes go on in several branches.

    The prompt of a step is that of the step before, its answer, and the output of a tool. It comes
    when the answer would end at 50 tokens a second, and a pause after that.

    Args:
        agents: start at `rate`; all begin with one shared prompt of `root` // 2 tokens.
        steps: of one agent, over all its branches.
        fork: probability that a step goes on in `branches` contexts, each with a pause of its own.
        step: length of a tool's output, from half to twice.
        pause, spread: median, and sigma of the logarithm (log-normal).
    """
    rng = np.random.default_rng(seed)
    new_ids = _unused()
    shared = new_ids(root // 2)
    requests = []
    for start in np.cumsum(rng.exponential(1 / rate, agents)).tolist():
        waiting = [(start, 0, shared + new_ids(root // 2))]
        made = 1
        for _ in range(steps):
            now, _, prompt = heapq.heappop(waiting)
            said = new_ids(answer)
            requests.append(_turn(now, prompt, said))
            for _ in range(branches if rng.random() < fork else 1):
                wait = answer / 50 + pause * float(np.exp(spread * rng.standard_normal()))
                output = new_ids(int(rng.integers(step // 2, step * 2)))
                heapq.heappush(waiting, (now + wait, made, prompt + said + output))
                made += 1
    return sorted(requests, key=lambda r: r.arrival)


def coding_agents(
    *, agents: int = 16, turns: int = 3, calls: int = 12, system: int = 16_384,
    message: int = 512, output: int = 1024, answer: int = 128, delegate: float = 0.1,
    pause: float = 4.0, think: float = 120.0, rate: float = 0.02, seed: int = 0,
) -> list[TraceRequest]:  # fmt: skip
    """Agents whose conversations grow by tool calls, and that sometimes give a task to a helper.

    About 50 calls a task and 100 prompt tokens or more for each of the answer, as Manus reports
    ("Context engineering for AI agents", 2025); nearly all of a prompt is that of the step before.

    Args:
        agents: start at `rate`; all begin with one shared prompt of `system` tokens.
        turns: messages of a user to one agent, each `think` seconds (median) after the last answer.
        calls: of tools, in a turn.
        output: length of a tool's output, from half to twice; it takes `pause` seconds (median).
        delegate: probability that a call goes to a helper instead, with a shared prompt of
            `system` // 2 tokens and `calls` of its own; its output is one message.
    """
    rng = np.random.default_rng(seed)
    new_ids = _unused()
    shared, helper = new_ids(system), new_ids(system // 2)
    requests = []

    def work(now: float, prompt: list[int], share: float) -> tuple[float, list[int]]:
        """A turn; returns its end, and the conversation until then."""
        for _ in range(calls):
            said = new_ids(answer)
            requests.append(_turn(now, prompt, said))
            now += answer / 50
            if rng.random() < share:
                now, _ = work(now, helper + new_ids(message), 0.0)
                result = new_ids(message)
            else:
                now += pause * float(np.exp(rng.standard_normal()))
                result = new_ids(int(rng.integers(output // 2, output * 2)))
            prompt = prompt + said + result
        return now, prompt

    for now in np.cumsum(rng.exponential(1 / rate, agents)).tolist():
        prompt = shared
        for _ in range(turns):
            now, prompt = work(now, prompt + new_ids(message), delegate)
            now += think * float(np.exp(rng.standard_normal()))
    return sorted(requests, key=lambda r: r.arrival)


def million_token_prompts(*, prompts: int = 14, tokens: int = MILLION) -> list[TraceRequest]:
    """vLLM's PR 43447: long prompts one by one, then look-ups of each at 10, 20, .. 100 %."""
    new_ids = _unused()
    contents = [new_ids(tokens) for _ in range(prompts)]
    requests = [_turn(float(i), ids, new_ids(1)) for i, ids in enumerate(contents)]
    for s, ids in enumerate(contents):
        for tenth in range(1, 11):
            size = tokens * tenth // 10
            part = np.array(ids[: -(-size // BLOCK)], dtype=np.int64)
            requests.append(TraceRequest(float(prompts + s), size, 0, part, BLOCK))
    return requests


def prefix_sweep(
    *, prefixes: int = 30, requests: int = 300, prefix: int = 27_648, user: int = 384,
    answer: int = 128, rate: float = 1.0, seed: int = 0,
) -> list[TraceRequest]:  # fmt: skip
    """vLLM's PR 40676: single questions behind one of `prefixes` long prefixes, each as likely."""
    rng = np.random.default_rng(seed)
    new_ids = _unused()
    starts = [new_ids(prefix) for _ in range(prefixes)]
    arrivals = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    chosen = rng.integers(prefixes, size=requests).tolist()
    return [
        _turn(arrival, starts[p] + new_ids(user), new_ids(answer))
        for arrival, p in zip(arrivals, chosen, strict=True)
    ]


GENERATORS = {
    "round-robin": round_robin,
    "agent-tree": agent_tree,
    "agent-pauses": agent_pauses,
    "coding-agents": coding_agents,
    "pr43447": million_token_prompts,
    "pr40676": prefix_sweep,
}
