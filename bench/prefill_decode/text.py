"""The report as aligned text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..common.results import aligned, machine_lines


def header(result: dict[str, Any]) -> str:
    machine, model, engine = result["machine"], result["model"], result["engine"]
    work, check, rates = result["workload"], result["check"], result["rates"]
    near_ties = check["tokens"] - check["exact_tokens"]
    threads = f" ({machine['threads']} CPU threads)"
    cache = "\ncache     ".join(engine["describe"].splitlines())
    return (
        f"{machine_lines(machine, threads)}\n"
        f"model     {model['name']}: {model['parameters'] / 1e6:.2f} M parameters, "
        f"{model['dtype']}, {model['source']}\n"
        f"engine    impl {engine['impl']}, KV cache {engine['kv_cache_dtype']}, "
        f"retention {engine['retention']!r}, at most {engine['max_num_seqs']} requests and "
        f"{engine['max_num_batched_tokens']} tokens a step\n"
        f"cache     {cache}\n"
        f"workload  {work['title']}: {work['requests']} requests, {work['prompt_tokens']} prompt "
        f"and {work['output_tokens']} output tokens\n"
        f"check     {check['requests']} of {check['of_requests']} requests against a full forward "
        f"pass without a cache: {check['exact_tokens']} of {check['tokens']} tokens are its "
        "argmax,\n"
        f"          {near_ties} others near-ties "
        f"(a gap below {check['largest_bound']:.2g} logits)\n"
        f"rates     copy {rates['copy_bytes_per_s'] / 1e9:.4g} GB/s read + written "
        f"({rates['copy_bytes'] / 2**20:.3g} MiB buffer), "
        f"matmul {rates['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s ({rates['matmul_size']}^3)"
    )


def table(result: dict[str, Any]) -> str:
    runs = {"caching on": result["cached"]}
    if result["tiers"] is not None:
        runs = {"with host memory": result["cached"], "without": result["tiers"]["without"]}
    if result["uncached"] is not None:
        runs["caching off"] = result["uncached"]
    rows = [_cells(run) for run in runs.values()]
    numbers = [("", *runs), *((name, *(row[name] for row in rows)) for name in rows[0])]
    times = (f"TTFT p50, ms, {name}" for name in runs)
    groups = [(result["workload"]["group_name"], "requests", "hit rate", *times)]
    for several in zip(*(run["groups"] for run in runs.values()), strict=True):
        one, ttft = several[0], (_number(group["ttft_p50_ms"]) for group in several)
        groups.append((str(one["group"]), str(one["requests"]), f"{one['hit_rate']:.1%}", *ttft))
    return "\n".join([*aligned(numbers), "", *aligned(groups), "", *_sentences(result)])


def split_table(result: dict[str, Any]) -> str:
    """CPU time of a step with caching on, a row for each part."""
    rows = [("part", "CPU s", "share", "decode step, us", "prefill step, us", "worst step, us")]
    for name, part in result["cached"]["split"]["parts"].items():
        medians = (_number(part[key]) for key in ("decode_us", "prefill_us", "worst_us"))
        rows.append((name, f"{part['cpu_s']:.3f}", f"{part['share']:.2%}", *medians))
    explanation = (
        "CPU time of the engine's thread; columns of steps: medians; "
        "worst step = the largest share outside of model, sample and wait"
    )
    return "\n".join([*aligned(rows), explanation])


def _cells(run: dict[str, Any]) -> dict[str, str]:
    """A column of the table, by the names of its rows."""
    prefill, decode, hit, pages = run["prefill"], run["decode"], run["hit"], run["pages"]
    allocator, outside = run["allocator"], run["split"]["outside_model"].values()
    return {
        "seconds": f"{run['seconds']:.2f}",
        "CPU seconds": f"{run['cpu_seconds']:.2f}",
        "steps (with prefill)": f"{run['steps']} ({prefill['steps']})",
        "output tokens/s": _number(run["output_tokens_per_s"]),
        "prefill tokens/s": _number(prefill["tokens_per_s"]),
        "decode tokens/s": _number(decode["tokens_per_s"]),
        "prefill over floor": _number(prefill["over_floor"], " x"),
        "decode over floor": _number(decode["over_floor"], " x"),
        "TTFT p50 / p99, ms": " / ".join(map(_number, run["ttft_ms"].values())),
        "ITL p50 / p99, ms": " / ".join(map(_number, run["itl_ms"].values())),
        "prompt tokens computed": str(hit["prompt_tokens"] - hit["tokens"]),
        "prefix hit rate": f"{hit['rate']:.1%}",
        "pages of requests, peak / now": f"{pages['peak_in_use']} / {pages['in_use']}",
        "pages with cached ones, peak / now": f"{pages['peak_cached']} / {pages['cached']}",
        "pages in all": str(pages["total"]),
        "preemptions": str(run["preemptions"]),
        "device idle between steps, us a step": _number(run["idle_us_per_step"]),
        "allocator, us a step": _number(allocator["us_per_step"]),
        "allocator, share of step time": f"{allocator['share_of_step']:.2%}",
        "CPU outside model, worst / p95 / all": " / ".join(f"{share:.1%}" for share in outside),
        "hashing, us a request": _number(allocator["hashing_us_per_request"]),
    }


def _sentences(result: dict[str, Any]) -> Iterator[str]:
    hit = result["cached"]["hit"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in hit["limited_by"].items())
    found = f"{hit['tokens']} of {hit['prompt_tokens']}"
    yield f"hits: {found} prompt tokens; limited by (requests): {reasons}"
    prefill = "prefill = steps with a chunk of more than one token"
    yield f"{prefill}; floor = operations at the measured matmul rate"
    decode = "decode = all other steps"
    yield f"{decode}; floor = bytes of weights and live K/V at the measured copy rate"

    def identical(same: dict[str, Any]) -> str:
        return (
            f"identical output: {same['identical_requests']} of {result['workload']['requests']} "
            f"requests, {same['identical_tokens']} of {same['output_tokens']} tokens"
        )

    def faster(same: dict[str, Any], detail: str = "") -> str:
        speed = f"{same['speedup']:.2f} x as fast{detail}"
        return f"{speed}, TTFT p50 {same['ttft_speedup']:.2f} x; {identical(same)}"

    if (same := result["comparison"]) is not None:
        fewer = hit["prompt_tokens"] / (hit["prompt_tokens"] - hit["tokens"])
        speed = faster(same, f" ({same['cpu_speedup']:.2f} x less CPU time)")
        yield f"caching on against off: {fewer:.2f} x fewer prompt tokens to compute, {speed}"
    if (host := result["tiers"]) is not None:
        count, moved = host["counters"], host["moved"]
        yield (
            f"host: {count['stored_points']} resume points and {count['stored_segments']} segments "
            f"stored, {count['loaded_points']} and {count['loaded_segments']} loaded; "
            f"{count['store_failures'] + count['load_failures']} failures"
        )
        to_host, to_device = moved["to_host"] / 2**20, moved["to_device"] / 2**20
        yield f"host: {to_host:.1f} MiB moved there, {to_device:.1f} MiB back"
        rates = f"{hit['rate']:.1%} instead of {host['without']['hit']['rate']:.1%}"
        yield f"with host memory against without: hit rate {rates}, {faster(host['comparison'])}"
    if (ranks := result["ranks"]) is not None:
        name = f"{ranks['size']} ranks"
        yield (
            f"{name}: a rank's pool of the same bytes holds {ranks['capacity']:.2f} x the context "
            "of one rank's"
        )
        yield f"{name} against one: {faster(ranks['comparison'])}"
    if (drafted := result["speculation"]) is not None:
        yield (
            f"drafts ({drafted['kind']}, {drafted['draft_tokens']} a step): {drafted['accepted']} "
            f"of {drafted['drafts']} accepted, {_number(drafted['tokens_per_step'])} tokens a step "
            f"and request; against no drafts: {drafted['steps']} steps instead of "
            f"{drafted['steps_without']}, {drafted['cpu_speedup']:.2f} x less CPU time, "
            f"{drafted['hit_tokens']} cached prompt tokens instead of "
            f"{drafted['hit_tokens_without']}; {identical(drafted)}"
        )


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return (f"{value:.0f}" if value >= 100 else f"{value:.3g}") + unit
