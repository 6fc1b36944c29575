"""Benchmarks, each run as ``python -m bench.<name>``: a table on the screen, numbers in a file with
``--json``.

    prefill_decode   the main job, end to end       kernels      kernels beside those of others
    kvcore           the allocator                  static       compiled code, without a GPU
    replay           hit rates of traces            tune         tile shapes, measured
    layers           a few layers of a real model   overhead     processor time of a launch
    gpu              all that needs a GPU           environment  what a machine is and has
    pages            results, written into Markdown pages

What these share: ``common`` (timing, error bounds, workloads), ``cases`` (named shapes, their tensors
and results), ``peers`` (implementations that are compared). ``results`` has rows of past runs.
"""

import os

if __name__ == "bench":  # started by ``python -m``
    from .checkout import make_importable

    make_importable()
if __name__ == "quire.bench" and "QUIRE_COMPILATIONS" in os.environ:
    from .common.compilations import VARIABLE, record_compilations

    record_compilations(os.environ[VARIABLE])
