"""Ctrl-C at any moment leaves an engine whole."""

import signal
import sys
import threading

import pytest

from quire.models.engine.engine import Engine, EngineConfig, interrupts_wait
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from tests.support.models.few import few
from tests.support.models.toy import finish

PARAMS = SamplingParams(4, ignore_eos=True, n=2)
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
            engine.add_request(prompt, PARAMS)
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
    moments = {
        *range(1, num_lines, num_lines // 20),
        *range(1, 30),
        *range(num_lines - 9, num_lines),
    }
    for moment in sorted(moments):
        assert run(moment)[1] == expected, moment


@pytest.mark.parametrize(("way", "call"), [("stream", 2), ("generate", 1)])
@pytest.mark.parametrize("where", ["forward", "drafter", "between"])
def test_an_interrupt_that_is_raised_in_a_step_leaves_an_engine_that_goes_on(way, where, call):
    """Whatever raises it: the requests of the call are aborted, and others go on."""
    model, drafter = random_model(few("gemma3-tiny")), NGramDrafter(2, min_ngram=1)
    llm = LLM(model, engine=EngineConfig(num_pages=200, max_num_seqs=4), drafter=drafter)
    engine = llm.engine
    owner, name = {
        "forward": (model, "forward"),
        "drafter": (drafter, "propose"),
        "between": (engine, "step"),
    }[where]
    params, calls = SamplingParams(12, ignore_eos=True), 0
    prompts, other = [[5] * 20, [6] * 9], [7] * 12
    expected = [o.token_ids for o in llm.generate([*prompts, other], params, progress=False)]
    engine.kv.clear()
    work = getattr(owner, name)

    def interrupting(*args, **more):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return work(*args, **more)

    kept = engine.add_request(other, params)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupting)
        if way == "generate":
            llm.generate(prompts, params, progress=False)
        else:
            list(llm.stream(prompts[0], params))
    assert engine.unfinished == {kept} and not llm._streams
    engine.kv.check_invariants()
    finished = finish(engine)
    assert [o.token_ids for o in finished] == expected[2:]
    again = llm.generate([*prompts, other], params, progress=False)
    assert [o.token_ids for o in again] == expected
    engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        reached = True
        signal.raise_signal(signal.SIGINT)
        reached = False
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_after_the_block_whatever_ended_it():
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)


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
