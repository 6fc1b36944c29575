"""Text in and out: streams, stop strings, `LLM`, chats, the command line."""

import fcntl
import io
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models import generate
from quire.models import llm as llm_module
from quire.models.config.named import get_config
from quire.models.engine.engine import EngineConfig
from quire.models.engine.outputs import OutputDelta, RequestError
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from quire.models.tokenizer import ByteTokenizer, FileTokenizer, TextStream, decode_of

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = EngineConfig(num_pages=300)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


def streamed(decode, ids, stop):
    """(text, pieces that were released, stop string or None) of a stream of ids."""
    stream, pieces, found = TextStream(decode, stop, ()), [], None
    for token in ids:
        found = stream.append(token)
        if found is not None:
            break
        pieces.append(stream.take())
    text = stream.finish()
    return text, [*pieces, stream.take()], found


# Streams.


def test_broken_bytes_are_not_held_for_ever():
    stream = TextStream(ByteTokenizer().decode, (), ())
    for i in range(40):
        stream.append(3 + 0x80 + i % 16)
        if i == 20:
            assert stream.take() != ""
    assert set(stream.finish()) == {"\ufffd"}


def test_a_stream_of_any_bytes_is_what_they_decode_to_together():
    """Marks that stand for themselves, broken characters, and whole ones right behind them."""
    rng, tokenizer = random.Random(0), ByteTokenizer()
    parts = [b"\xef\xbf\xbd", "🙂".encode(), "é".encode(), b"\x80", b"\xf0\x9f", b"a"]
    for _ in range(300):
        data = b"".join(rng.choices(parts, k=12))
        text, pieces, _ = streamed(tokenizer.decode, [3 + byte for byte in data], ())
        assert text == "".join(pieces) == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("words", "stop", "pieces", "found"),
    [
        (["a", "b"], (), ["a", "b", ""], None),
        (["one", " STOP two"], ("STOP",), ["one", " "], "STOP"),
        (["one ST", "OP"], ("STOP",), ["one ", ""], "STOP"),
        (["one ST", "OR", "M"], ("STOP",), ["one ", "STOR", "M", ""], None),
        (["one ST"], ("STOP",), ["one ", "ST"], None),
        (["SSTO", "P"], ("STOP",), ["S", ""], "STOP"),
        (["aab", "aac"], ("aabaac",), ["", ""], "aabaac"),
        (["xabc"], ("bc", "ab"), ["x"], "ab"),
        (["\n", "\nq"], ("\n\n",), ["", ""], "\n\n"),
        (["ab", "abX"], ("abab", "babX"), ["", ""], "abab"),
        (["a", "b", "c", "d"], ("bcd",), ["a", "", "", ""], "bcd"),
    ],
)
def test_stop_strings_and_what_is_held_back(words, stop, pieces, found):
    """Words are tokens."""
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    text = "".join(pieces)
    assert streamed(decode, range(len(words)), stop) == (text, pieces, found)


def write_tokenizer(path, kind):
    """A tokenizer.json of a common kind, with three special tokens in front.

    Returns:
        (tokenizer, ids of words, [ids of the bytes of a character]).
    """
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json files")
    decoders, level = tokenizers.decoders, tokenizers.pre_tokenizers.ByteLevel
    special, letters = ["<eos>", "<|channel>", "<channel|>"], []
    if kind == "byte-level":
        letters, words = sorted(level.alphabet()), ["Ġa", "Ġstop", "ĠĠ"]
        decoder = decoders.ByteLevel()
    elif kind == "wordpiece":
        words = ["a", "b", "世", "stop", "##a", "##b", "##stop", ".", "!", "'s", "n't", "don"]
        decoder = decoders.WordPiece(prefix="##")
    else:
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
        words = ["▁", "▁▁", "▁▁▁▁", ".", "▁leading", "▁x", "a", "▁a", "b", "世", "▁世", "!", "stop"]
        words += ["▁stop", "\n"]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * (kind == "llama"))
    ids = {token: i for i, token in enumerate([*special, *letters, *words])}
    if kind == "wordpiece":
        model = tokenizers.models.WordPiece(ids, unk_token=special[0])
    else:
        model = tokenizers.models.BPE(ids, [], byte_fallback=kind != "byte-level")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    if kind == "byte-level":
        backend.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
        words += "abop.!Ġ"
    backend.add_special_tokens(special)
    backend.save(str(path / "tokenizer.json"))
    split = [backend.encode(character).ids for character in "é東🙂 " if letters]
    return FileTokenizer(path / "tokenizer.json"), [ids[word] for word in words], split


@pytest.mark.parametrize("kind", ["gemma", "llama", "byte-level", "wordpiece"])
def test_a_stream_with_special_tokens_is_one_decode(tmp_path, kind):
    """Random ids, special ones and bytes of characters: text, pieces and stop strings."""
    tokenizer, words, split = write_tokenizer(tmp_path, kind)
    assert all(len(ids) > 1 for ids in split[:3])
    rng = random.Random(0)
    for _ in range(700):
        given = []
        for _ in range(rng.randrange(1, 12)):
            what = rng.random()
            if what < 0.3:
                given.append(rng.randrange(3))
            elif what < 0.4 and split:
                for letter in rng.choice(split):
                    given += [*rng.choices(range(3), k=rng.choice([0, 0, 0, 9])), letter]
            else:
                given.append(rng.choice(words))
        for skip in (True, False):
            whole = tokenizer.decode(given, skip_special_tokens=skip)
            if "\ufffd" in whole:
                continue
            for stop in ((), (" stop", "a a")):
                text, pieces, _ = streamed(decode_of(tokenizer, skip), given, stop)
                end = min((at for s in stop if (at := whole.find(s)) >= 0), default=len(whole))
                assert "".join(pieces) == text == whole[:end], (given, stop)


# LLM.


@pytest.fixture(scope="module")
def llm():
    return LLM("gemma3-tiny", engine=SETTINGS)


def test_streams_may_be_read_in_turns_and_left(llm):
    params = SamplingParams(12, ignore_eos=True)
    expected = [llm.generate(p, params, progress=False)[0].token_ids for p in ("first", "second")]
    one, two, left = (llm.stream(prompt, params) for prompt in ("first", "second", "x"))
    next(left)
    left.close()
    got = [next(one).token_ids, next(two).token_ids]
    for first, second in zip(one, two, strict=True):
        got = [got[0] + first.token_ids, got[1] + second.token_ids]
    assert got == expected
    # One that ends while the other is read.
    one, two = llm.stream("first", params), llm.stream("second", params)
    begun = next(two).token_ids
    assert sum((delta.token_ids for delta in one), ()) == expected[0]
    assert sum((delta.token_ids for delta in two), begun) == expected[1]
    assert not llm._streams
    assert not llm.engine.has_work and llm.engine.kv.stats()["pages_in_use"] == 0
    # Whoever reads one that was added at the engine, it is not `generate`.
    other = llm.engine.add_request([5, 6], SamplingParams(2, ignore_eos=True), stream=True)
    [output] = llm.generate([[7, 8]], replace(params, max_tokens=4), progress=False)
    assert len(output.token_ids) == 4 and other not in llm.engine.unfinished


def test_bad_streams_are_refused_at_once(llm):
    with pytest.raises(ValueError, match="prompt_token_ids: expected ints"):
        llm.stream([999])
    without = LLM(llm.model, engine=SETTINGS)
    without.tokenizer = without.engine.tokenizer = None
    message = "stop: expected no strings, as this engine has no tokenizer"
    with pytest.raises(ValueError, match=message):
        without.generate([[5]], SamplingParams(stop="x"), progress=False)
    assert not without.engine.has_work
    assert [d.text for d in without.stream([5], SamplingParams(2))] == ["", ""]


# The command line.

BASE = ["--model", "gemma3-tiny", "--num-pages", "99", "--ignore-eos", "--max-tokens", "5"]


@pytest.fixture
def run(capsys):
    """Runs the command; returns (status, stdout, stderr)."""
    threads = torch.get_num_threads()

    def run(*arguments):
        return generate.main([*arguments]), *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)


def test_prompts_files_and_stdin(run, tmp_path, monkeypatch):
    status, expected, _ = run(*BASE, "--prompt", "hello")
    assert status == 0 and expected.endswith("\n") and len(expected) > 1
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n", encoding="utf-8")
    assert run(*BASE, "--file", str(file)) == (0, expected, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run(*BASE) == (0, expected, "")
    for threads in range(1, min(2, os.cpu_count()) + 1):
        assert run(*BASE, "--prompt", "hello", "--threads", str(threads))[1] == expected
        assert torch.get_num_threads() == threads
    # Greedy samples are equal.
    assert run(*BASE, "--prompt", "hello", "--prompt", "hello", "--n", "2")[1] == 4 * expected
    sampled = [run(*BASE, "--prompt", "hello", "--temperature", "2", "--seed", s) for s in "112"]
    assert sampled[0] == sampled[1] != sampled[2]


def test_drafters_do_not_show_and_statistics_go_to_stderr(run):
    command = [*BASE, "--model", "deepseek-v4-tiny", "--prompt", "abc" * 7, "--max-tokens", "8"]
    _, plain, err = run(*command)
    assert err == ""
    for drafter in ("ngram", "mtp"):
        _, out, err = run(*command, "--speculate", "2", "--drafter", drafter, "--stats")
        assert out == plain
        for word in (
            "pool",
            "99 pages",
            "tokens    8 generated",
            "model and sampling",
            "drafts   ",
        ):
            assert word in err
    assert "drafts    0 of 0" not in err  # of mtp
    status, _, err = run(*BASE, "--prompt", "a", "--speculate", "1", "--drafter", "mtp")
    assert status == 2 and "error: model: expected one with MTP layers" in err


def test_a_chat_continues_from_its_own_answers(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="renders chat templates")
    save_checkpoint(random_model(get_config("gemma3-tiny")), tmp_path)
    base = [*BASE, "--model", str(tmp_path), "--chat"]
    status, _, err = run(*base)
    assert status == 2 and "chat: expected a chat_template.jinja" in err
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}[a]"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nthere\n"))
    _, out, _ = run(*base, "--system", "s")
    llm, tokenizer = LLM(tmp_path, engine=SETTINGS), ByteTokenizer()

    def answer(text):
        ids = tokenizer.encode(text, special=False)
        return llm.generate([ids], SamplingParams(5, ignore_eos=True), progress=False)[0].text

    first = answer("[s]s[u]hi[a]")
    second = answer(f"[s]s[u]hi[a]{first}[u]there[a]")
    assert out == f"{first}\n{second}\n"


def test_a_question_that_is_too_long_is_refused_and_the_chat_goes_on(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"one\n{'x' * 200}\ntwo\n"))
    status, out, err = run(*BASE, "--chat", "--max-model-len", "90")
    message = "error: prompt_token_ids: expected 1..89 ids (max_model_len - 1), got 2"
    assert status == 2 and err.startswith(message) and err.count("\n") == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert run(*BASE, "--chat") == (0, out, "")


def test_the_chat_command_has_the_options_of_a_chat(run, monkeypatch):
    outputs = []
    for name, arguments in (("quire generate", ["--chat"]), ("quire chat", [])):
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        outputs.append(run(*BASE, *arguments))
    assert outputs[0] == outputs[1]
    shown = generate._parser().format_help()
    assert "--system" in shown and "quire generate" not in shown
    for option in ("--prompt", "--file", "--chat", "--n ", "--max-num-seqs"):
        assert option not in shown
        assert "error: " in run(*BASE, f"{option.strip()}=1")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gemma-9", "model: there is no"),
        ("--top-p 0", "top_p: expected a finite number > 0, got 0"),
        ("--num-pages 3", "num_pages: expected at least 5"),
        ("--max-model-len 8", "prompt_token_ids: expected 1..7 ids (max_model_len - 1)"),
        ("--threads 0", "threads: expected an int in 1.."),
        ("--memory-fraction 2", "memory_fraction: expected a number above 0 and at most 1, got 2"),
        ("--max-num-seqs 0", "max_num_seqs: expected an int >= 1, got 0"),
        ("--device nowhere", "device: expected one of this machine's, got 'nowhere': "),
        ("--device cuda:99", "device: expected one of this machine's, got 'cuda:99': "),
        ("--speculate -1", "speculate: expected an int in 0..128, got -1"),
        ("--drafter ngram", "drafter: expected --speculate K with it, got none"),
        ("--system s", "system: expected --chat with it, got none"),
        ("--chat --n 2", "n: expected 1 in a chat, got 2"),
        ("--file nowhere.txt", "file: cannot read 'nowhere.txt': No such file"),
        ("--prompt \udcff", "prompt: expected UTF-8 text"),
        ("--prompt=", "prompt: expected a prompt"),
    ],
)
def test_errors_name_the_argument(arguments, message, run):
    has_prompt = {"--file", "--chat"} & {*arguments.split()}
    base = ["--model", "gemma3-tiny", *([] if has_prompt else ["--prompt", "a long prompt"])]
    status, _, err = run(*base, *arguments.split())
    assert status == 2 and f"error: {message}" in err


@pytest.mark.parametrize(
    ("stdin", "options", "message"),
    [
        (None, ([], ["--chat"]), "stdin: expected a prompt, got a closed stream"),
        # Bytes that are no text, as Python hands them over.
        ("\udcff\n", ([], ["--chat"]), "stdin: expected UTF-8 text"),
        ("", ([],), "stdin: expected a prompt, got an empty text"),
        (b"\xff\n", ([],), "file: expected UTF-8"),
        (b"\n", ([],), "file: expected a prompt"),
    ],
)
def test_what_is_no_prompt(stdin, options, message, run, monkeypatch, tmp_path):
    """On stdin, or bytes in a file."""
    for arguments in options:
        if isinstance(stdin, bytes):
            (tmp_path / "prompt").write_bytes(stdin)
            arguments = ["--file", str(tmp_path / "prompt")]
        else:
            monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        status, _, err = run(*BASE, *arguments)
        assert status == 2 and f"error: {message}" in err


def test_random_weights_larger_than_the_memory_are_refused_before_they_fill_it(monkeypatch, run):
    monkeypatch.setattr(llm_module, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(llm_module.sys, "platform", "linux")
    status, _, err = run(*BASE, "--model", "gemma4-small", "--device", "cpu", "--prompt", "a")
    message = "error: model: 'gemma4-small' takes 0.01055 GiB of memory, and 0.0009766 GiB are free"
    assert status == 2 and message in err
    assert run(*BASE, "--model", "gemma4-tiny", "--device", "cpu", "--prompt", "a")[0] == 0


def test_triton_on_a_cpu_is_refused(monkeypatch, run):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    status, _, err = run(*BASE, "--device", "cpu", "--prompt", "a", "--impl", "triton")
    assert status == 2 and "error: impl: 'triton' is supported on GPUs" in err


def test_a_checkpoint_says_how_it_is_sampled(tmp_path, run):
    save_checkpoint(random_model(get_config("gemma3-tiny")), tmp_path)
    full = {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    greedy = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "top_p": 5}))
    with pytest.raises(ValueError, match="top_p: expected a number above 0 and at most 1, got 5"):
        LLM(tmp_path, engine=SETTINGS)
    for content, params in (
        ({}, {}),
        (greedy, {"repetition_penalty": 1.5}),
        ({"do_sample": True, "top_k": None}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),
        ({"do_sample": True, "eos_token_id": 1, **full}, full),
    ):
        file.write_text(json.dumps(content))
        llm = LLM(tmp_path, engine=SETTINGS)
        assert llm.default_params == SamplingParams(**params)
    ignoring = {"max_tokens": 5, "ignore_eos": True}
    params = [SamplingParams(**full, seed=7, **ignoring), SamplingParams(**ignoring)]
    sampled, greedy = (o.text for o in llm.generate(["a", "a"], params, progress=False))
    command = [*BASE, "--model", str(tmp_path), "--prompt", "a", "--stats"]
    _, out, err = run(*command, "--seed", "7")
    said = "sampling  temperature 2, top_k 50, top_p 0.9, min_p 0.01, repetition_penalty 1.1\n"
    assert out == f"{sampled}\n" and said in err
    _, out, err = run(*command, "--temperature", "0", "--repetition-penalty", "1")
    assert out == f"{greedy}\n" != f"{sampled}\n" and "sampling  greedy\n" in err
    one, two = LLM(tmp_path, engine=SETTINGS), LLM(tmp_path, engine=SETTINGS)
    [output] = one.generate("a", progress=False)
    assert "".join(d.text for d in two.stream("a")) == output.text


def test_ctrl_c_in_a_chat_ends_the_answer_and_forgets_the_question(monkeypatch, capsys):
    """At the prompt it ends the chat."""
    asked = []

    def stream(self, ids, params):
        asked.append(self.tokenizer.decode(ids))
        yield OutputDelta("0", 0, (5,), "half", None)
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield OutputDelta("0", 0, (5,), "whole", "length")

    def lines():
        yield from ("one\n", "two\n", "three\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lines().__next__)
    )
    assert generate.main(["--model", "gemma3-tiny", "--num-pages", "99", "--chat"]) == 0
    assert capsys.readouterr().out == "half\nhalfwhole\nhalfwhole\n"
    two = "user: two\nassistant: "
    assert asked == ["user: one\nassistant: ", two, f"{two}halfwhole\nuser: three\nassistant: "]


def test_an_error_of_one_of_several_prompts(run, monkeypatch):
    answer = LLM.generate

    def fail_one(self, *args, **options):
        first, second = answer(self, *args, **options)
        return [replace(first, error=RequestError("spoiled")), second]

    monkeypatch.setattr(LLM, "generate", fail_one)
    status, _, err = run(*BASE, "--prompt", "a", "--prompt", "b")
    assert (status, err) == (2, "error: spoiled\n")


def test_a_chat_at_a_terminal():
    """Ctrl-C ends an answer, the arrow keys bring a question back, and Ctrl-D ends the chat."""
    pytest.importorskip("readline", reason="edits lines")
    ours, theirs = pty.openpty()
    options = ["--chat", "--threads", "1", "--max-tokens", "4000", "--ignore-eos"]
    command = [sys.executable, "-m", "models.generate", "--model", "gemma3-tiny", *options]
    process = subprocess.Popen(
        [*command, "--num-pages", "999"], cwd=ROOT, start_new_session=True,
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "dumb"},
        preexec_fn=lambda: (
            fcntl.ioctl(0, termios.TIOCSCTTY, 0), signal.signal(signal.SIGINT, signal.SIG_DFL)
        ),
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def wait_for(text, more=0):
        """Reads until ``text`` has come, and so many bytes after it."""
        nonlocal shown
        while text not in shown or len(shown.partition(text)[2]) < more:
            assert select.select([ours], [], [], 60)[0], shown
            shown += os.read(ours, 4096)
        shown = shown.partition(text)[2]

    wait_for(b"> ")
    os.write(ours, b"first question\n")
    wait_for(b"first question\r\n", more=40)
    os.write(ours, b"\x03")
    wait_for(b"\n> ")
    os.write(ours, b"\x1b[A\n")
    wait_for(b"first question\r\n", more=40)
    os.write(ours, b"\x03")
    wait_for(b"\n> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(ours)


def test_text_goes_through_bytes(capsys):
    llm = LLM("gemma3-tiny", engine=SETTINGS)
    many = llm.generate(["héllo", "a"], [FOUR, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert "2/2" in capsys.readouterr().err  # the bar
    assert many[0].prompt_token_ids == (2, *(3 + byte for byte in "héllo".encode()))
    assert [len(output.token_ids) for output in many] == [4, 2]
    one = llm.generate("héllo", FOUR, progress=False)
    assert capsys.readouterr().err == ""
    assert one[0].text == ByteTokenizer().decode(one[0].token_ids) == many[0].text


def test_chat_takes_variables_and_tools(tmp_path):
    pytest.importorskip("transformers", reason="renders chat templates")
    save_checkpoint(random_model(get_config("gemma3-tiny")), tmp_path)
    template = "{{ enable_thinking }}{{ tools[0].name }}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    llm = LLM(tmp_path, engine=SETTINGS)
    settings = {"tools": [{"name": "f"}], "enable_thinking": True}
    outputs = llm.chat([{"role": "user", "content": "x"}], replace(FOUR, n=2), **settings)
    assert [len(output.token_ids) for output in outputs] == [4, 4]
    assert outputs[0].prompt_token_ids == tuple(ByteTokenizer().encode("Truefx", special=False))


def test_tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json files")
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "one": 3, "two": 4, "[UNK]": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("one two three") == [2, 3, 4, 5]
    assert tokenizer.encode("<bos> one", special=False) == [2, 3]
    assert tokenizer.decode([2, 3, 4, 1]) == "one two"
    save_checkpoint(random_model(get_config("gemma3-tiny")), tmp_path)
    llm = LLM(tmp_path, engine=SETTINGS)
    assert llm.generate("one", FOUR, progress=False)[0].prompt_token_ids == (2, 3)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"path: expected a tokenizer in .*tokenizer\.json'"):
        LLM(tmp_path, engine=SETTINGS)


def test_prompts_that_are_refused_queue_nothing(monkeypatch):
    llm = LLM("gemma3-tiny", engine=SETTINGS)
    for prompts, params, message in (
        ([[5], [999]], FOUR, "prompt_token_ids: expected ints"),
        ([[5], [6]], [FOUR], "params: expected one for each of 2 prompts, got 1"),
        ([[5], [6]], 7, "params: expected one for each of 2 prompts, got 7"),
        ([[5], [6]], [FOUR, None], "params: expected SamplingParams, got None"),
        ([[5], None], FOUR, "prompt_token_ids: expected a list of ids, got None"),
        (None, FOUR, "prompts: expected a list of texts or of ids, got None"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            llm.generate(prompts, params, progress=False)

    def panic(*args, **more):
        raise BaseException("of Rust")

    for text, reason in (("\ud800", "'utf-8' codec can't encode"), ("a", "BaseException: of Rust")):
        for call in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}])):
            with pytest.raises(ValueError, match=f"^prompts: expected text .*: {reason}"):
                call(text)
        monkeypatch.setattr(llm.tokenizer, "encode", panic)
    llm.tokenizer = None
    with pytest.raises(ValueError, match="prompts: expected token ids, got text"):
        llm.generate("text", FOUR)
    assert not llm.engine.has_work


def test_models_and_dtypes_by_name():
    for dtype in ("float16", "torch.float16", torch.float16):
        assert LLM("gemma3-tiny", engine=SETTINGS, dtype=dtype).model.dtype == torch.float16
    supported = r"dtype: supported are \['bfloat16', 'float16', 'float32'\], got"
    for dtype in ("half", torch.int8, torch.float64):
        with pytest.raises(NotImplementedError, match=supported):
            LLM("gemma3-tiny", engine=SETTINGS, dtype=dtype)
    names = r"(?s)model: there is no 'gemma-9'.*deepseek-v4-flash, .*llama-tiny"
    with pytest.raises(ValueError, match=names):
        LLM("gemma-9")
    with pytest.raises(ValueError, match="device, dtype: expected None with a built model"):
        LLM(random_model(get_config("gemma3-tiny")), device="cpu")
