"""Events as vLLM's own classes read them (`tests.support.models.vllm_events`), where vLLM is."""

from tests.support.models.vllm_python import said_by

IMAGE = "c0ffee00" * 8


def test_vllm_reads_adapter_images_salt_and_session(tmp_path_factory):
    full, *rest = said_by(tmp_path_factory, "vllm_events.py")
    keys = [["sql", "tenant"], ["sql", [IMAGE, 1]], ["sql"]]
    assert full == ["BlockStored", 3, "sql", keys, "s", 0, "full_attention"]
    assert {tuple(event[5:]) for event in rest if event[0] == "BlockStored"} == {
        (1, "sliding_window")
    }
    assert all(event[1:3] == [3, "sql"] for event in rest if event[0] == "BlockStored")
    assert rest[-1][0] == "AllBlocksCleared"
