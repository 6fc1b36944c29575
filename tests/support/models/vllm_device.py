"""A device and worker for vLLM's schedulers, simulated: one pool of pages for all groups and nothing else.

A step writes the rows of its tokens where the tables say that workers keep (`SchedulerOutput`: new pages appended, those of resumed
requests replaced). Then each query reads the rows that it sees, and the next token is a hash of these. A row's content is a hash of the
tokens up to it, made here from token lists; nothing of an allocator is asked what is right.
"""

import copy

import numpy as np
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

LONGEST, VOCAB, DRAFTS, NO_TOKEN = 512, 5000, 3, 5001
MASK = (1 << 64) - 1


def mixed(x):
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Text:
    """Tokens of a request and what their rows hold: a hash of all tokens before and at each; never 0."""

    def __init__(self, tokens):
        self.tokens, self.rows, self.sums = [], np.zeros(LONGEST + 64, np.uint64), [0]
        self.extend(tokens)

    def extend(self, tokens):
        for token in tokens:
            n = len(self.tokens)
            self.rows[n] = row = mixed((int(self.rows[n - 1]) if n else 1) * 31 + token) | 1
            self.sums.append((self.sums[-1] + row) & MASK)
            self.tokens.append(token)

    def cut(self, n):
        del self.tokens[n:], self.sums[n + 1 :]

    def next(self, position, groups):
        """The token after `position`, from the rows that its query should see."""
        total = 0
        for g, (_, window) in enumerate(groups):
            low = 0 if window is None else max(0, position - window + 1)
            total = mixed(total ^ (((self.sums[position + 1] - self.sums[low]) * tag(g)) & MASK))
        return total % VOCAB


def tag(group):
    return 2 * group + 3


class Worker:
    """Runs steps against one pool."""

    def __init__(self, groups, num_pages, drafts, seed):
        self.groups, self.seed, self.num_drafts = groups, seed, DRAFTS if drafts else 0
        self.memory = np.zeros((num_pages, max(size for size, _ in groups)), np.uint64)
        self.states = {}
        self.checked = self.wrong = self.accepted = self.rejected = 0

    def take(self, step):
        """Copies that a launch takes along: the scheduler changes its own lists meanwhile."""
        return copy.deepcopy((
            [(r.req_id, r.prefill_token_ids or r.prompt_token_ids, list(r.block_ids), r.num_computed_tokens) for r in step.scheduled_new_reqs],
            step.scheduled_cached_reqs, step.num_scheduled_tokens, step.scheduled_spec_decode_tokens,
            [*step.finished_req_ids, *(step.preempted_req_ids or ())],
        ))  # fmt: skip

    def follow(self, new, cached, gone, is_async):
        """State of requests in workers: [text, tables, tokens computed, own drafts]."""
        for rid in gone:
            self.states.pop(rid, None)
        for rid, tokens, tables, computed in new:
            self.states[rid] = [Text(tokens), [*map(list, tables)], computed, []]
        for rid, pages, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):  # fmt: skip
            state = self.states.get(rid)
            if rid in cached.resumed_req_ids:
                state = self.states[rid] = [Text(cached.all_token_ids[rid]), [*map(list, pages)], computed, []]  # fmt: skip
            elif pages:
                for table, added in zip(state[1], pages, strict=True):
                    table += added
            assert is_async or state[2] == computed

    def run(self, work, is_async):
        """Output of a step, and drafts for the next one."""
        new, cached, counts, given, gone = work
        self.follow(new, cached, gone, is_async)
        writes, parts = {}, []
        for rid, n in counts.items():
            text, tables, start, own = self.states[rid]
            known = len(text.tokens) - start
            drafts = given.get(rid, [])
            if drafts and is_async and own:
                drafts = own[: len(drafts)] + [NO_TOKEN] * (len(drafts) - len(own))
            drafts = [NO_TOKEN if d < 0 else d for d in drafts]
            assert n <= known or len(drafts) == n - known, (n, known, drafts)
            drafts = drafts[: max(0, n - known)]
            text.extend(drafts)
            parts.append((rid, text, tables, start, start + n, drafts))
            for g, (size, _) in enumerate(self.groups):
                at = np.arange(start, start + n)
                blocks = at // size
                if blocks[-1] >= len(tables[g]):
                    self.wrong += n
                    continue
                pages = np.array(tables[g])[blocks]
                self.wrong += int(np.count_nonzero(pages == 0))
                rows = text.rows[start : start + n] * np.uint64(tag(g))
                for key, row in zip((pages * 4096 + at % size).tolist(), rows.tolist(), strict=True):  # fmt: skip
                    self.wrong += writes.setdefault(key, row) != row
                self.memory[pages, at % size] = rows
        sampled, proposed = [], []
        for rid, text, tables, start, end, drafts in parts:
            reads = [self.read(text, tables[g], g, start, end) for g in range(len(self.groups))]
            out = []
            first = len(text.tokens) - len(drafts) - 1
            for i, position in enumerate(range(first, end)):
                out.append(self.sample(reads, position, start))
                if i >= len(drafts) or drafts[i] != out[-1]:
                    break
            self.accepted += max(0, len(out) - 1)
            self.rejected += len(drafts) - max(0, len(out) - 1)
            text.cut(first + 1)
            if end > first:
                text.extend(out)
                self.states[rid][2] = len(text.tokens) - 1
            else:
                out, self.states[rid][2] = [], end
            sampled.append(out)
            proposed.append(self.propose(rid, text) if out else [])
            self.states[rid][3] = proposed[-1]
        ids = list(counts)
        index = {rid: i for i, rid in enumerate(ids)}
        return ModelRunnerOutput(ids, index, sampled_token_ids=sampled), DraftTokenIds([*ids], proposed)  # fmt: skip

    def read(self, text, table, g, start, end):
        """Rows that the queries of [start, end) see of a group, checked: (first, their contents)."""
        size, window = self.groups[g]
        low = 0 if window is None else max(0, start - window + 1)
        at = np.arange(low, end)
        blocks = at // size
        pages = np.array(table + [0] * (int(blocks[-1]) + 1 - len(table)))[blocks]
        rows = np.where(pages > 0, self.memory[pages, at % size], np.uint64(0))
        self.checked += len(at)
        self.wrong += int(np.count_nonzero(rows != text.rows[low:end] * np.uint64(tag(g))))
        return low, rows

    def sample(self, reads, position, start):
        total = 0
        for g, (low, rows) in enumerate(reads):
            window = self.groups[g][1]
            first = 0 if window is None else max(0, position - window + 1)
            total = mixed(total ^ int(rows[first - low : position + 1 - low].sum(dtype=np.uint64)))
        return total % VOCAB

    def propose(self, rid, text):
        """Guesses of a drafter that is right three times out of four."""
        n, drafts = len(text.tokens), []
        room = min(self.num_drafts, LONGEST - n)
        for _ in range(room):
            guess = text.next(len(text.tokens) - 1, self.groups)
            if mixed(len(text.tokens) * 7919 + self.seed) % 4 == 0:
                guess = (guess + 1) % VOCAB
            drafts.append(guess)
            text.extend([guess])
        text.cut(n)
        return drafts
