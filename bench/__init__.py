"""Benchmarks, each run as ``python -m bench.<name>``: a table on the screen, numbers in a file with
``--json``.

    prefill_decode       the main job, end to end     kernels   kernels beside those of others
    kvcore               the allocator                static    compiled code, without a GPU
    replay               hit rates of traces          tune      tile shapes, measured
    gpu                  all that needs a GPU

These share ``common`` (timing, error bounds, workloads), ``cases`` (named shapes, their tensors and
results) and ``peers`` (implementations that are compared). ``results`` has rows of past runs.
"""

if __name__ == "bench":  # started by ``python -m``
    from . import checkout  # noqa: F401
