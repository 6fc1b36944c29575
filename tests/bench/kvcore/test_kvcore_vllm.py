"""vLLM's allocator in `bench.kvcore`: what it takes for present, what it refuses, and where vLLM is installed, that it measures."""

import gc
import sys

import pytest

from quire.bench.kvcore import measure
from quire.bench.kvcore import vllm as kvcore_vllm

MODULES = [name.split(".") for name in kvcore_vllm.USED]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a made-up vLLM of some version on the path, with empty modules or others."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    def put(version, text=""):
        for parts in MODULES:
            folder = tmp_path
            for part in parts[:-1]:
                folder = folder / part
                folder.mkdir(exist_ok=True)
                (folder / "__init__.py").touch()
            (folder / f"{parts[-1]}.py").write_text(text)
        info = tmp_path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


def test_absent_vllm_is_none_and_an_import_error(monkeypatch):
    without_vllm(monkeypatch)
    assert kvcore_vllm.available() is None
    with pytest.raises(ImportError, match="vllm: not installed"):
        kvcore_vllm.rows("v4")


def test_a_broken_installation_does_not_raise(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", object())  # find_spec raises for it
    assert kvcore_vllm.available() is None


def test_a_folder_of_that_name_is_not_an_installation(tmp_path, monkeypatch, install):
    if kvcore_vllm.available():
        pytest.skip("vLLM is installed")
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kvcore_vllm.available() is None


def test_asking_for_the_version_imports_nothing(install):
    install("0.33.7", "raise AssertionError('imported')")
    assert kvcore_vllm.available() == "0.33.7"
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("version", ["0.32.0", "0.330.0", "1.33.0", "0.34.0rc1"])
def test_an_unknown_version_is_refused_by_name(install, version):
    install(version, "raise AssertionError('imported')")
    with pytest.raises(NotImplementedError, match=rf"expected 0\.33, got {version}"):
        kvcore_vllm.rows("v4")


def test_a_known_version_with_another_api_is_refused(install):
    install("0.33.1")
    with pytest.raises(NotImplementedError, match=r"0\.33\.1 with another API.*SamplingParams"):
        kvcore_vllm.rows("gemma4-31b")


def test_a_vllm_that_does_not_import_says_why(install):
    install("0.33.1", "raise ImportError('no libcudart')")
    with pytest.raises(ImportError, match="no libcudart"):
        kvcore_vllm.rows("v4")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["llama"], {}, "spec: expected one of .*'llama'"),
        (["v4", "hash"], {}, "names: expected .*'hash'"),
        (["v4", "decode_step_0"], {}, "names: expected"),
        (["v4", "decode_step_256_mean"], {}, "names: expected"),
        (["v4"], {"repeats": 0}, "repeats, steps: expected at least 1, got 0, 100"),
        (["v4"], {"steps": 0}, "repeats, steps: expected at least 1, got 3, 0"),
    ],
)
def test_bad_arguments(monkeypatch, arguments, options, message):
    without_vllm(monkeypatch)
    with pytest.raises(ValueError, match=message):
        kvcore_vllm.rows(*arguments, **options)


def test_both_allocators_get_the_same_work():
    assert kvcore_vllm.MILLION == measure.MILLION and kvcore_vllm.CHUNK == measure.CHUNK
    assert set(kvcore_vllm.GROUPS) == set(measure.SPECS)
    for spec, groups in kvcore_vllm.GROUPS.items():
        paged = [g for g in measure.SPECS[spec] if g.kind != "state"]
        shapes = [(g.block_size, g.sliding_window) for g in paged]
        assert shapes == groups[: len(paged)]
        # What is left are the compressor states, which vLLM keeps in windows and quire in slots.
        assert (len(paged) < len(groups)) == any(g.kind == "state" for g in measure.SPECS[spec])


@pytest.mark.parametrize("spec", kvcore_vllm.GROUPS)
def test_every_figure_of_an_installed_vllm(monkeypatch, spec):
    version = kvcore_vllm.available()
    if version is None or not version.startswith(tuple(f"{v}." for v in kvcore_vllm.KNOWN)):
        pytest.skip(f"needs vLLM {', '.join(kvcore_vllm.KNOWN)}; here: {version}")
    monkeypatch.setattr(kvcore_vllm, "MILLION", 1 << 16)
    names = [n for n in kvcore_vllm.NAMES if not n.startswith("decode")] + ["decode_step_3"]
    rows = kvcore_vllm.rows(spec, *names, repeats=1, steps=8)
    assert [(r["name"], r["spec"]) for r in rows] == [(name, spec) for name in names]
    assert all(r["value"] > 0 for r in rows)
    assert [r["name"] for r in rows if r["unit"] == "B"] == ["pool_1m_bytes"]
    assert gc.get_freeze_count() == 0
