"""S3-FIFO, an eviction policy that is no ranking, beside LRU on generated traffic of agents.

python examples/s3fifo.py
quire bench replay --eviction lru examples.s3fifo:S3FIFO
"""

from collections import OrderedDict


class S3FIFO:
    """A small queue for new entries, a main queue for used ones: a scan flushes only the first.

    Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).
    """

    def __init__(self, small=0.1, remembered=4096):
        self.share, self.remembered = small, remembered
        self.small, self.main = OrderedDict(), OrderedDict()  # entry -> uses that were spent
        self.victims = OrderedDict()  # keys evicted from the small queue

    def add(self, entry):
        if entry not in self.small and entry not in self.main:
            returns = self.victims.pop(entry.key, False)
            (self.main if returns else self.small)[entry] = 0

    def discard(self, entry):
        self.small.pop(entry, None)
        self.main.pop(entry, None)

    def pop(self):
        while self.small or self.main:
            most = self.share * (len(self.small) + len(self.main))
            is_small = bool(self.small) and (len(self.small) > most or not self.main)
            entry, spent = (self.small if is_small else self.main).popitem(last=False)
            uses = min(3, entry.num_uses - spent)
            if uses:  # it goes round again
                self.main[entry] = entry.num_uses - (0 if is_small else uses - 1)
                continue
            if is_small:
                self.victims[entry.key] = True
                if len(self.victims) > self.remembered:
                    self.victims.popitem(last=False)
            return entry
        return None

    def coming(self, n):
        entries = [*self.small.items(), *self.main.items()]
        unused_first = sorted(entries, key=lambda item: item[0].num_uses - item[1])
        return [entry for entry, _ in unused_first[:n]]

    def asked(self, keys, hit, kept=()):
        pass


def main():
    """Replay agents in pools of 20 and 60 % of the dense working set; print hit rates."""
    from quire.bench.replay.experiment import EVICTIONS, run_grid
    from quire.bench.replay.generators import agent_tree
    from quire.bench.replay.simulate import SimulatedTiming, TraceWorkload

    EVICTIONS["s3-fifo"] = S3FIFO
    workload, pools = TraceWorkload("agents", agent_tree(trees=8, depth=4)), ["20%", "60%"]
    policies, timing = ["lru", "s3-fifo"], SimulatedTiming()
    rows = run_grid(workload, "gpt-oss-like", pools, ["auto"], policies, timing, progress=False)
    for row in rows:
        if row["eviction"] in policies:
            print(f"{row['pool']} {row['eviction']:8}{row['hit_rate']:.1%}")


if __name__ == "__main__":
    main()
