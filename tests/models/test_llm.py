"""LLM: models by name, directory or object; prompts as text or ids; the progress bar."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.engine.engine import EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from quire.models.tokenizer import ByteTokenizer, FileTokenizer

SETTINGS = EngineConfig(num_pages=200)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


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
