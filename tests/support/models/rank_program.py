"""A program of rank 0, which a test stops or kills with its other rank.

python -m tests.support.models.rank_program SECONDS

It prints the process id of rank 1 as soon as that was started, then "loading" when the weights are
there and its drafter is made, which takes a while, "ready" when it generates, and at last the error
that ended it.
"""

import subprocess
import sys
import time

from quire.models.engine.config import EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM
from quire.models.parallel import launch
from quire.models.parallel.heartbeat import RankError
from tests.support.models import rank_program

NAMED = 3  # exit status


class Started(subprocess.Popen):
    """Prints its process id."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)


def slow_drafter(model) -> None:
    """Made in every rank. There is none."""
    if model.group.rank == 0:
        print("loading", flush=True)
    time.sleep(2)


def main() -> None:
    launch.subprocess.Popen = Started
    launch.RANK_TIMEOUT = float(sys.argv[1])
    config = EngineConfig(num_pages=100, tensor_parallel_size=2)
    try:
        # By the name under which the other rank imports it.
        llm = LLM("llama-tiny", engine=config, drafter=rank_program.slow_drafter)
        print("ready", flush=True)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        while True:
            llm.generate([[5, 6, 7], [8, 9]], params, progress=False)
    except RankError as error:
        print("named:", error, flush=True)
        sys.exit(NAMED)


if __name__ == "__main__":
    main()
