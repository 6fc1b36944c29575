"""The report as aligned text."""

from __future__ import annotations

from typing import Any

from ..common.table import aligned


def header(result: dict[str, Any]) -> str:
    """Machine, model and workload, and the result of the check."""
    machine, model, engine = result["machine"], result["model"], result["engine"]
    work, check, rates = result["workload"], result["check"], result["rates"]
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    lines = [
        f"device    {machine['device']} ({machine['threads']} CPU threads){driver}",
        f"software  python {machine['python']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"commit {machine['commit']}",
        f"model     {model['name']}: {model['parameters'] / 1e6:.2f} M parameters, {model['dtype']}, {model['source']}",
        f"engine    impl {engine['impl']}, KV cache {engine['kv_cache_dtype']}, retention {engine['retention']!r}, at most {engine['max_num_seqs']} requests and "
        f"{engine['max_num_batched_tokens']} tokens a step",
        *(f"cache     {line}" for line in engine["describe"].splitlines()),
        f"workload  {work['title']}: {work['requests']} requests, {work['prompt_tokens']} prompt and "
        f"{work['output_tokens']} output tokens",
        f"check     {check['requests']} of {check['of_requests']} requests against a full forward pass without a cache: "
        f"{check['exact_tokens']} of {check['tokens']} tokens are its argmax,",
        f"          {check['tokens'] - check['exact_tokens']} others near-ties (a gap below {check['largest_bound']:.2g} logits)",
        f"rates     copy {rates['copy_bytes_per_s'] / 1e9:.4g} GB/s read + written ({rates['copy_bytes'] / 2**20:.3g} MiB buffer), "
        f"matmul {rates['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s ({rates['matmul_size']}^3)",
    ]
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """The numbers of both runs side by side, then results per group, then the comparison."""
    runs = {"caching on": result["cached"]}
    if (behind := result["tiers"]) is not None:
        runs = {"with host memory": result["cached"], "without": behind["without"]}
    if result["uncached"] is not None:
        runs["caching off"] = result["uncached"]
    if (other := result["other_impl"]) is not None:
        runs = {f"{name}, {result['engine']['impl']}": run for name, run in runs.items()}
        runs[f"caching on, {other['impl']}"] = other["run"]
    rows = [("", *runs)]
    rows += [(name, *map(cell, runs.values())) for name, cell in _ROWS]
    group_name = result["workload"]["group_name"]
    groups = [(group_name, "requests", "hit rate", *(f"TTFT p50 ms, {name}" for name in runs))]
    for several in zip(*(run["groups"] for run in runs.values()), strict=True):
        one = several[0]
        groups.append(
            (
                str(one["group"]),
                str(one["requests"]),
                f"{one['hit_rate']:.1%}",
                *(_number(g["ttft_p50_ms"]) for g in several),
            )
        )
    lines = [*aligned(rows), "", *aligned(groups), "", _limits(result["cached"])]
    if (compared := result["comparison"]) is not None:
        hit = result["cached"]["hit"]
        fewer = hit["prompt_tokens"] / (hit["prompt_tokens"] - hit["tokens"])
        lines.append(
            f"caching on against off: {fewer:.2f} x fewer prompt tokens to compute, {compared['speedup']:.2f} x as fast ({compared['cpu_speedup']:.2f} x less CPU time), TTFT p50 {compared['ttft_speedup']:.2f} x; identical output: "
            f"{compared['identical_requests']} of {result['workload']['requests']} requests, "
            f"{compared['identical_tokens']} of {compared['output_tokens']} tokens"
        )
    if behind is not None:
        lines += _tiers(behind, result)
    if (parallel := result["ranks"]) is not None:
        lines += _ranks(parallel, result)
    if other is not None:
        lines.append(_against(other, result))
    if (drafted := result["speculation"]) is not None:
        lines.append(
            f"drafts ({drafted['kind']}, {drafted['draft_tokens']} a step): {drafted['accepted']} of {drafted['drafts']} accepted, "
            f"{_number(drafted['tokens_per_step'])} tokens a step and request; against no drafts: {drafted['steps']} steps instead of "
            f"{drafted['steps_without']}, {drafted['cpu_speedup']:.2f} x less CPU time, {drafted['hit_tokens']} cached prompt tokens instead of "
            f"{drafted['hit_tokens_without']}; identical output: {drafted['identical_requests']} of {result['workload']['requests']} "
            f"requests, {drafted['identical_tokens']} of {drafted['output_tokens']} tokens"
        )
    return "\n".join(lines)


def split_table(result: dict[str, Any]) -> str:
    """CPU time of a step with caching on, a row for each part."""
    split = result["cached"]["split"]
    rows = [("part", "CPU s", "share", "decode step, us", "prefill step, us", "worst step, us")]
    for name, part in split["parts"].items():
        medians = (_number(part[key]) for key in ("decode_us", "prefill_us", "worst_us"))
        rows.append((name, f"{part['cpu_s']:.3f}", f"{part['share']:.2%}", *medians))
    return "\n".join(
        [
            *aligned(rows),
            "CPU time of the engine's thread; columns of steps: medians; worst step = the largest share outside of model, sample and wait",
        ]
    )


def _tiers(behind: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Pages stored and loaded by the host tier, and the gain."""
    same, rates = (
        behind["comparison"],
        [result["cached"]["hit"]["rate"], behind["without"]["hit"]["rate"]],
    )
    count, moved = behind["counters"], behind["moved"]
    return [
        f"host: {count['stored_points']} resume points and {count['stored_segments']} segments stored, {count['loaded_points']} and "
        f"{count['loaded_segments']} loaded; {count['store_failures'] + count['load_failures']} failures",
        f"host: {moved['to_host'] / 2**20:.1f} MiB moved there, {moved['to_device'] / 2**20:.1f} MiB back",
        f"with host memory against without: hit rate {rates[0]:.1%} instead of {rates[1]:.1%}, {same['speedup']:.2f} x as fast, TTFT p50 {same['ttft_speedup']:.2f} x; "
        f"identical output: {same['identical_requests']} of {result['workload']['requests']} requests, "
        f"{same['identical_tokens']} of {same['output_tokens']} tokens",
    ]


def _ranks(parallel: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Bytes that ranks send, and a comparison with one rank."""
    same, tokens = parallel["comparison"], parallel["tokens_per_step"]
    share, least = parallel["sent_share"], parallel["least_bytes_per_layer_token"]
    summed = parallel["sum_bytes_per_layer_token"]
    return [
        f"{parallel['size']} ranks: a rank sends {share * tokens * summed / 1024:.4g} KiB a layer a step ({tokens:.1f} tokens), {summed / least:.3f} x the least "
        f"possible {share * tokens * least / 1024:.4g} KiB; and {parallel['gather_bytes_per_row'] / 1024:.4g} KiB of logits for each sampled row",
        f"{parallel['size']} ranks: a rank's pool of the same bytes holds {parallel['capacity']:.2f} x the context of one rank's",
        f"{parallel['size']} ranks against one: {same['speedup']:.2f} x as fast, TTFT p50 {same['ttft_speedup']:.2f} x; identical output: "
        f"{same['identical_requests']} of {result['workload']['requests']} requests, {same['identical_tokens']} of {same['output_tokens']} tokens",
    ]


def _against(other: dict[str, Any], result: dict[str, Any]) -> str:
    """The other implementation's times against those of the first, and how their outputs differ."""
    same, ours = other["comparison"], result["cached"]
    phases = ", ".join(
        f"{phase} steps {ours[phase]['seconds'] / seconds:.2f} x"
        for phase in ("prefill", "decode")
        if (seconds := other["run"][phase]["seconds"])
    )
    return (
        f"{other['impl']} against {result['engine']['impl']}: {same['speedup']:.2f} x as fast ({phases}), TTFT p50 {same['ttft_speedup']:.2f} x; identical output: "
        f"{same['identical_requests']} of {result['workload']['requests']} requests, {same['identical_tokens']} of {same['output_tokens']} tokens"
    )


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return (f"{value:.0f}" if value >= 100 else f"{value:.3g}") + unit


def _percentile_cell(name: str):
    return lambda run: f"{_number(run[name]['p50'])} / {_number(run[name]['p99'])}"


def _pages(run: dict[str, Any]) -> str:
    pages = run["pages"]
    return f"{pages['peak_in_use']} / {pages['in_use']}"


def _cached_pages(run: dict[str, Any]) -> str:
    pages = run["pages"]
    return f"{pages['peak_cached']} / {pages['cached']}"


def _outside(run: dict[str, Any]) -> str:
    return " / ".join(f"{share:.1%}" for share in run["split"]["outside_model"].values())


_ROWS = (
    ("seconds", lambda run: f"{run['seconds']:.2f}"),
    ("CPU seconds", lambda run: f"{run['cpu_seconds']:.2f}"),
    ("steps (with prefill)", lambda run: f"{run['steps']} ({run['prefill']['steps']})"),
    ("output tokens/s", lambda run: _number(run["output_tokens_per_s"])),
    ("prefill tokens/s", lambda run: _number(run["prefill"]["tokens_per_s"])),
    ("decode tokens/s", lambda run: _number(run["decode"]["tokens_per_s"])),
    ("prefill over floor", lambda run: _number(run["prefill"]["over_floor"], " x")),
    ("decode over floor", lambda run: _number(run["decode"]["over_floor"], " x")),
    ("TTFT p50 / p99, ms", _percentile_cell("ttft_ms")),
    ("ITL p50 / p99, ms", _percentile_cell("itl_ms")),
    ("prompt tokens computed", lambda run: str(run["hit"]["prompt_tokens"] - run["hit"]["tokens"])),
    ("prefix hit rate", lambda run: f"{run['hit']['rate']:.1%}"),
    ("pages of requests, peak / now", _pages),
    ("pages with cached ones, peak / now", _cached_pages),
    ("pages in all", lambda run: str(run["pages"]["total"])),
    ("preemptions", lambda run: str(run["preemptions"])),
    ("device idle between steps, us a step", lambda run: _number(run["idle_us_per_step"])),
    ("allocator, us a step", lambda run: _number(run["allocator"]["us_per_step"])),
    ("allocator, share of step time", lambda run: f"{run['allocator']['share_of_step']:.2%}"),
    ("CPU outside model, worst / p95 / all", _outside),
    ("hashing, us a request", lambda run: _number(run["allocator"]["hashing_us_per_request"])),
)


def _limits(run: dict[str, Any]) -> str:
    hit = run["hit"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in hit["limited_by"].items())
    return (
        f"hits: {hit['tokens']} of {hit['prompt_tokens']} prompt tokens; limited by (requests): {reasons}\n"
        "prefill = steps with a chunk of more than one token; floor = operations at the measured matmul rate\n"
        "decode = all other steps; floor = bytes of weights and live K/V at the measured copy rate"
    )
