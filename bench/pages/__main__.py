"""Write measured figures into Markdown pages, or check that they are those of ``bench/results``.

    python -m bench.pages                      # every page of this checkout that has marked blocks
    python -m bench.pages --check              # writes nothing; exit status 1 if a page differs
    python -m bench.pages --check README.md

A page marks a block, and what stands between its markers is replaced::

    <!-- begin generated: allocator-costs -->
    <!-- end generated -->

Blocks, and what they are made from:

    first-figures              the four figures of the first page: kvcore.json, and V4 memory
    allocator-costs            kvcore.json: times of the allocator beside vLLM's
    tier-costs                 kvcore.json: times of the calls of tiers
    replay-round-robin         replay_round_robin.json: hit rate by policy and size of the pool
    replay-conversation        replay_conversation.json, replay_conversation_gemma.json
    replay-conversation-parts  the same trace in three parts: replay_conversation*.json
    replay-prefix-sweep        replay_prefix_sweep.json: the sweep of vLLM's PR 40676
    replay-pr43447             replay_pr43447.json: the experiment of vLLM's PR 43447
    v4-memory                  arithmetic of `models.deepseek_v4.memory`; nothing is measured
    static-summary             static/VERSION.json: kernels, spills and limits by architecture
    support-legend             what *tested*, *compiled* and *refused* say
    support-attention          tested.json, static/VERSION.json: operators over K and V pages
    support-latent             the same of MLA and of DeepSeek-V4's operators

``tested.json`` is made from the case tables of the tests: ``python -m tests.tested``.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.pages.__main__")

from collections.abc import Sequence
from pathlib import Path

from quire.models.command import Parser, program

from .blocks import ROOT, marked, pages, replaced


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parser().parse_args(argv)
    status = 0
    for path in args.file or pages(ROOT):
        text = path.read_text(encoding="utf-8")
        new, names = replaced(text), ", ".join(marked(text)) or "no block"
        if new == text:
            print(f"{path}: as the results say: {names}")
        elif args.check:
            print(f"{path}: differs from the results: {names}")
            status = 1
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{path}: written: {names}")
    return status


def _parser() -> Parser:
    parser = Parser("bench.pages", __doc__)
    parser.add_argument("file", type=Path, nargs="*", help="pages; default: all with marked blocks")
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    return parser
