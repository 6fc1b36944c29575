"""A program of rank 0, which a test stops or kills with its other rank.

python -m tests.support.models.rank_program SECONDS

It prints the process id of rank 1 as soon as that was started, then "ready" when it generates, and
at last the error that ended it.
"""

import subprocess
import sys

from quire.models.engine.config import EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM
from quire.models.parallel import launch
from quire.models.parallel.heartbeat import RankError

NAMED = 3  # exit status


class Started(subprocess.Popen):
    """Prints its process id."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)


def main() -> None:
    launch.subprocess.Popen = Started
    launch.RANK_TIMEOUT = float(sys.argv[1])
    config = EngineConfig(num_pages=100, tensor_parallel_size=2)
    try:
        llm = LLM("llama-tiny", engine=config)
        print("ready", flush=True)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        while True:
            llm.generate([[5, 6, 7], [8, 9]], params, progress=False)
    except RankError as error:
        print("named:", error, flush=True)
        sys.exit(NAMED)


if __name__ == "__main__":
    main()
