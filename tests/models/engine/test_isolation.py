"""A failure in one request ends that request alone, and Ctrl-C at any moment leaves an engine whole.

`test_engine_many` has more of them.
"""

import math
import signal
import sys
import threading
from dataclasses import replace

import pytest

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.deepseek_v4.drafters import MTPDrafter
from quire.models.engine.engine import Engine, EngineConfig, interrupts_wait
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.generate import main
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from tests.support.models.few import few
from tests.support.models.toy import ToyModel, finish

BAD = 63  # an id whose rows are spoiled
PROMPTS = {"a": [25, 26, 27] * 27, "b": [28, 29] * 60, "bad": [31, BAD, 32] * 21, "c": [33] * 99}
SETTINGS = EngineConfig(max_num_seqs=4, max_num_batched_tokens=48, num_pages=300)
PARAMS = SamplingParams(6, ignore_eos=True)


def run(engine, prompts):
    """(finish reason, tokens) by id; the allocator is recounted after each step."""
    for name, prompt in prompts.items():
        engine.add_request(prompt, PARAMS, request_id=name)
    outputs = {o.request_id: (o.finish_reason, o.token_ids) for o in finish(engine)}
    assert engine.kv.stats()["pages_in_use"] == 0
    return outputs


@pytest.mark.parametrize(
    ("name", "changes", "drafter"),
    [
        ("gemma4-e-tiny", {"tie_word_embeddings": False}, None),
        ("deepseek-v4-tiny", {}, None),
        ("deepseek-v4-tiny", {"num_mtp_layers": 1}, MTPDrafter),  # rows of the drafter are NaN too
    ],
)
def test_nan_of_a_model_reaches_no_other_request_and_no_cached_page(name, changes, drafter):
    """Of a token's embedding; logits of other tokens are numbers."""
    model = random_model(replace(few(name), **changes))
    model.embed_tokens.weight.data[BAD] = math.nan

    def engine():
        return Engine(model, SETTINGS, drafter=drafter and drafter(model, 2))

    expected = run(engine(), {k: v for k, v in PROMPTS.items() if k != "bad"})
    used = engine()
    for _ in range(2):  # the second time with what the first one left in pages, rings and cache
        outputs = run(used, PROMPTS)
        assert outputs.pop("bad")[0] == "nan" and outputs == expected
    # The prompt is the same up to the spoiled token, and after it: neither is found.
    assert used.kv.match(PROMPTS["bad"]).num_tokens == 0
    model.embed_tokens.weight.data[BAD] = 0.5
    bad = {"bad": PROMPTS["bad"]}
    assert run(used, bad) == run(engine(), bad)


def test_generate_exits_with_an_error_for_logits_of_nan(tmp_path, capsys):
    model = random_model(get_config("gemma3-tiny"))
    model.norm.weight.data.fill_(3e38)  # finite weights, as a checkpoint may have them
    save_checkpoint(model, tmp_path)
    for arguments in (["--prompt", "a"], ["--prompt", "a", "--prompt", "b"]):
        assert main(["--model", str(tmp_path), *arguments, "--max-tokens", "3"]) == 2
        assert (
            "error: request '0': expected logits whose largest is a number"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize("in_thread", [False, True])
def test_calls_while_a_step_runs_are_refused(in_thread):
    """From within it, and from a second thread."""
    model = ToyModel()
    engine, forward, refused = Engine(model, SETTINGS), model.forward, []
    first = engine.add_request([5] * 9, SamplingParams(3, ignore_eos=True))

    def call():
        calls = {"add_request": ([5],), "abort": (first,), "step": (), "close": ()}
        for name, arguments in calls.items():
            message = f"^{name}: expected to be called between steps, got"
            with pytest.raises(RuntimeError, match=message):
                getattr(engine, name)(*arguments)
            refused.append(name)

    def calling(*args, **more):
        if in_thread:
            second = threading.Thread(target=call)
            second.start()
            second.join()
        else:
            call()
        return forward(*args, **more)

    model.forward = calling
    [output] = finish(engine)
    assert output.request_id == first and len(output.token_ids) == 3
    assert len(refused) == 4 * engine.totals.num_steps


pytestmark = pytest.mark.usefixtures("ctrl_c")


def interrupted_at(moment, work):
    """Send SIGINT before line ``moment`` of engine or allocator; return (ended, lines run)."""
    lines = 0

    def of_line(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == moment:
            signal.raise_signal(signal.SIGINT)
        return of_line

    def of_call(frame, event, argument):
        inside = ("quire.models.", "quire.kvcore")
        return of_line if frame.f_globals.get("__name__", "").startswith(inside) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        work()
        return True, lines
    except KeyboardInterrupt:
        return False, lines
    finally:
        sys.settrace(before)


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_comes_after_it():
    """Also where a program steps an engine itself: the step is whole, its report is lost."""
    engine = Engine(random_model(few("gemma3-tiny")), EngineConfig(num_pages=200, max_num_seqs=4))

    def run(moment):
        """The lines of the step that was interrupted, and the tokens of what finished after it."""
        engine.kv.clear()
        for prompt in ([5] * 20, [6] * 3):
            engine.add_request(prompt, SamplingParams(4, ignore_eos=True, n=2))
        engine.step()  # the prompts
        ended, num_lines = interrupted_at(moment, engine.step)
        assert ended == (moment is None)
        engine.kv.check_invariants()
        finished = finish(engine)
        assert engine.kv.stats()["pages_in_use"] == 0
        return num_lines, [output.token_ids for output in finished]

    num_lines, expected = run(None)
    assert num_lines > 300 and len(expected) == 4
    # The first lines and the last ones are those that hold the signal and let it go.
    ends = {*range(1, 30), *range(num_lines - 9, num_lines)}
    for moment in sorted(ends.union(range(1, num_lines, num_lines // 20))):
        assert run(moment)[1] == expected, moment


@pytest.mark.parametrize(("way", "call"), [("stream", 2), ("generate", 1)])
@pytest.mark.parametrize("where", ["forward", "propose", "step"])
def test_an_interrupt_that_is_raised_in_a_step_leaves_an_engine_that_goes_on(
    way, call, where, monkeypatch
):
    """Whatever raises it: the requests of the call are aborted, and others go on."""
    model, drafter = random_model(few("gemma3-tiny")), NGramDrafter(2, min_ngram=1)
    llm = LLM(model, engine=EngineConfig(num_pages=200, max_num_seqs=4), drafter=drafter)
    engine, params, calls = llm.engine, SamplingParams(12, ignore_eos=True), []
    prompts, other = [[5] * 20, [6] * 9], [7] * 12

    def outputs():
        return [o.token_ids for o in llm.generate([*prompts, other], params, progress=False)]

    expected = outputs()
    engine.kv.clear()
    owner = {"forward": model, "propose": drafter, "step": engine}[where]
    work = getattr(owner, where)

    def interrupting(*args, **more):
        calls.append(where)
        if len(calls) == call:
            raise KeyboardInterrupt
        return work(*args, **more)

    kept = engine.add_request(other, params)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, where, interrupting)
        if way == "generate":
            llm.generate(prompts, params, progress=False)
        else:
            list(llm.stream(prompts[0], params))
    assert engine.unfinished == {kept} and not llm._streams
    engine.kv.check_invariants()
    assert [o.token_ids for o in finish(engine)] == expected[2:]
    assert outputs() == expected
    engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0


def test_when_a_signal_that_was_held_back_is_handled():
    """After the block, whatever ended it; a second one at once."""
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)
    reached = 0
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        reached = 1
        signal.raise_signal(signal.SIGINT)
        reached = 2
    assert reached == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_is_changed_in_other_threads_or_where_nobody_handles_the_signal():
    seen = []

    def look():
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    look()
    assert seen == [signal.default_int_handler, signal.SIG_IGN]
