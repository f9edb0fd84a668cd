"""Hub ids against a local server: sharded, resumed, gated, offline, GGUF files, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError, ModelNotFound
from octavo.model.load import list_models, load_model, pull
from octavo.model.load.expected import expected_tensors
from tests.unit.hub_server import COMMIT, Hub, serving
from tests.unit.load_files import hf_config_json, random_tensors, tiny, write_folder, write_gguf

CONFIG = tiny("llama", num_layers=2)
TENSORS = random_tensors(expected_tensors(CONFIG))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def folder_repo(hub: Hub, tmp_path: Path, *, shards: int = 1, repo: str = "acme/tiny", **changes: Any) -> None:
    values = hf_config_json(CONFIG, "LlamaForCausalLM", **changes)
    hub.add_folder(repo, write_folder(tmp_path / "upload", values, TENSORS, shards=shards))


def gguf_repo(hub: Hub, tmp_path: Path, *names: str, split: int = 0, repo: str = "acme/tiny-GGUF") -> None:
    folder = tmp_path / "gguf"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_gguf(folder / name, CONFIG, TENSORS, tokenizer={}, split_tensors=split)
    hub.add_folder(repo, folder)


def check(spec: str) -> Any:
    loaded = load_model(spec, progress=False)
    for name, weight in TENSORS.items():
        assert torch.equal(loaded.tensors.tensor(name), torch.from_numpy(weight)), name
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello world")) == "hello world"
    return loaded


@pytest.mark.parametrize("shards", [1, 3])
def test_a_repository_is_fetched_once(shards: int, hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path, shards=shards)
    hub.repos["acme/tiny"]["original/params.json"] = b"not wanted"
    loaded = check("acme/tiny")
    assert loaded.name == "acme/tiny"
    assert not (loaded.path / "original").exists() and loaded.chat_template is not None
    before = len(hub.log)
    check("acme/tiny")
    assert len(hub.log) == before, "a cached repository asked the network"
    pinned = [path for _, path, _ in hub.log if path.endswith(".safetensors")]
    assert pinned and all(f"/resolve/{COMMIT}/" in path for path in pinned), "files of two versions could mix"


def test_a_broken_connection_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    hub.cut_after_bytes["model.safetensors"] = 5000
    check("acme/tiny")
    assert hub.fetched("model.safetensors") == [None, "bytes=5000-"]


def test_the_next_run_goes_on_where_the_last_one_stopped(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    hub.cut_after_bytes["model.safetensors"], hub.cut_always = 0, True
    kept = tmp_path / "cache/hub/acme/tiny/model.safetensors.incomplete"
    with pytest.raises(ModelError, match="connection closed .*try again to go on"):
        pull("acme/tiny", progress=False)
    data = hub.repos["acme/tiny"]["model.safetensors"]
    kept.write_bytes(data[:7000])
    assert not (kept.parent / "model.safetensors").exists()
    hub.cut_after_bytes.clear()
    hub.log.clear()
    check("acme/tiny")
    assert hub.fetched("model.safetensors") == ["bytes=7000-"]
    assert not kept.exists() and not kept.with_name(kept.name + ".json").exists()


def test_a_part_of_another_version_is_thrown_away(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    kept = tmp_path / "cache/hub/acme/tiny/model.safetensors.incomplete"
    kept.parent.mkdir(parents=True)
    for content in (b"x" * 900, b"y" * 10**6):  # a shorter one, and one longer than the file
        kept.write_bytes(content)
        kept.with_name(kept.name + ".json").write_text(json.dumps({"etag": '"former"'}))
        check("acme/tiny")
        (kept.parent / ".octavo-complete.json").unlink()
        (kept.parent / "model.safetensors").unlink()


def test_wrong_content_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    hub.wrong_digest = True
    with pytest.raises(ModelError, match="SHA-256") as caught:
        pull("acme/tiny", progress=False)
    assert Path(str(caught.value.file)).name == "model.safetensors"
    assert not list((tmp_path / "cache/hub/acme/tiny").glob("model.safetensors*te"))
    hub.wrong_digest = False
    check("acme/tiny")


def test_a_gated_repository_says_how_to_give_a_token(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_repo(hub, tmp_path)
    hub.gated["acme/tiny"] = "hf_secret"
    with pytest.raises(ModelError, match="401.*gated.*no token was given.*HF_TOKEN") as caught:
        load_model("acme/tiny", progress=False)
    assert f"{hub.url}/acme/tiny" in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match="403.*the token was refused.*HF_TOKEN"):
        load_model("acme/tiny", progress=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    check("acme/tiny")


def test_a_stored_token_is_used(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    hub.gated["acme/tiny"] = "hf_stored"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("hf_stored\n")
    check("acme/tiny")


def test_the_token_stays_with_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come from another host: the hub's token is none of its business."""
    folder_repo(hub, tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving() as store:
        store.repos = hub.repos
        hub.redirect_to = store.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        hub.cut_after_bytes["model.safetensors"] = 10**9
        check("acme/tiny")
        assert store.log and set(store.tokens_seen) == {None}
        assert set(hub.tokens_seen) == {"hf_secret"}


def test_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_repo(hub, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="acme/tiny is not in the cache and HF_HUB_OFFLINE is set"):
        load_model("acme/tiny", progress=False)
    assert hub.log == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    pull("acme/tiny", progress=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check("acme/tiny")


def test_a_half_fetched_repository_is_not_taken_for_a_whole_one(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_repo(hub, tmp_path, shards=3)
    last = "model-00003-of-00003.safetensors"
    data = hub.repos["acme/tiny"].pop(last)
    with pytest.raises(ModelError, match=last):
        pull("acme/tiny", progress=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="not in the cache"):
        pull("acme/tiny", progress=False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.repos["acme/tiny"][last] = data
    check("acme/tiny")


def test_what_other_tools_have_fetched_is_used(hub: Hub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hf/hub/models--acme--tiny/snapshots" / COMMIT
    write_folder(snapshot, hf_config_json(CONFIG, "LlamaForCausalLM"), TENSORS, shards=2)
    refs = tmp_path / "hf/hub/models--acme--tiny/refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert check("acme/tiny").path == snapshot
    assert hub.log == []
    next(snapshot.glob("model-*.safetensors")).unlink()  # no longer complete: fetch it ourselves
    folder_repo(hub, tmp_path)
    assert check("acme/tiny").path != snapshot


def test_unsupported_models_are_refused_before_their_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path, num_local_experts=8)
    with pytest.raises(ModelError, match="MoE"):
        load_model("acme/tiny", progress=False)
    assert hub.fetched("model.safetensors") == []
    hub.repos["acme/lora"] = {"adapter_config.json": b"{}"}
    with pytest.raises(ModelError, match="LoRA"):
        load_model("acme/lora", progress=False)


# -- GGUF in a repository --------------------------------------------------------------------------------------------


def test_a_repository_with_one_gguf_file(hub: Hub, tmp_path: Path) -> None:
    gguf_repo(hub, tmp_path, "tiny.Q4_K_M.gguf")
    hub.repos["acme/tiny-GGUF"]["mmproj-tiny.gguf"] = b"vision part"
    assert check("acme/tiny-GGUF").path.name == "tiny.Q4_K_M.gguf"
    before = len(hub.log)
    check("acme/tiny-GGUF")
    assert len(hub.log) == before


def test_one_of_several_gguf_files(hub: Hub, tmp_path: Path) -> None:
    gguf_repo(hub, tmp_path, "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "sub/tiny-F16.gguf")
    with pytest.raises(ModelError, match="3 GGUF files match.*acme/tiny-GGUF/sub/tiny-F16.gguf"):
        load_model("acme/tiny-GGUF", progress=False)
    assert check("acme/tiny-GGUF:q8_0").path.name == "tiny-Q8_0.gguf"
    assert check("acme/tiny-GGUF/sub/tiny-F16.gguf").path.name == "tiny-F16.gguf"
    assert check("acme/tiny-GGUF:Q8_0").path.name == "tiny-Q8_0.gguf"
    with pytest.raises(ModelError, match="no GGUF file matches 'Q5_1'.*allowed: acme"):
        load_model("acme/tiny-GGUF:Q5_1", progress=False)
    with pytest.raises(ModelNotFound, match="absent.gguf"):
        load_model("acme/tiny-GGUF/absent.gguf", progress=False)


def test_a_split_gguf_file(hub: Hub, tmp_path: Path) -> None:
    gguf_repo(hub, tmp_path, "tiny-Q4.gguf", split=8)
    assert check("acme/tiny-GGUF").path.name == "tiny-Q4-00001-of-00003.gguf"
    assert check("acme/tiny-GGUF:Q4").path.name == "tiny-Q4-00001-of-00003.gguf"


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_names_that_do_not_exist(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="acme/nothing.*does not exist"):
        load_model("acme/nothing", progress=False)
    hub.repos["acme/empty"] = {"README.md": b"x"}
    with pytest.raises(ModelError, match="no config.json and no GGUF"):
        load_model("acme/empty", progress=False)
    for name in ("a/b/c", "acme/../../etc", "a b", "acme/", "", "http://x/y"):
        with pytest.raises(ModelNotFound, match="known names are smollm2, gemma3-270m|no such file"):
            load_model(name, progress=False)


def test_a_hub_that_is_down(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.model.load.download.time.sleep", lambda s: None)
    hub.status = 503
    with pytest.raises(ModelError, match="503"):
        load_model("acme/tiny", progress=False)
    assert len(hub.log) == 5
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="could not be reached"):
        load_model("acme/tiny", progress=False)


def test_a_full_disk(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file larger than any disk: refused with the numbers before it is written."""
    folder_repo(hub, tmp_path)

    class Endless(bytes):
        def __len__(self) -> int:
            return 10**18

    hub.repos["acme/tiny"]["model.safetensors"] = Endless(b"x")
    with pytest.raises(ModelError, match="disk is full.*1000000000000 MB are needed.*OCTAVO_CACHE"):
        pull("acme/tiny", progress=False)


def test_a_cache_folder_that_cannot_be_made(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_repo(hub, tmp_path)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", "/sys/octavo-cache"):
        monkeypatch.setenv("OCTAVO_CACHE", str(folder))
        with pytest.raises(ModelError, match=f"{folder}.*OCTAVO_CACHE"):
            pull("acme/tiny", progress=False)


def test_models_lists_what_is_there(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    assert [(m.name, m.path) for m in list_models()] == [("smollm2", None), ("gemma3-270m", None)]
    path = pull("acme/tiny", progress=False)
    row = list_models()[-1]
    assert (row.name, row.path) == ("acme/tiny", path)
    assert row.size_bytes >= sum(w.nbytes for w in TENSORS.values())


def test_pull_with_verify_asks_again(hub: Hub, tmp_path: Path) -> None:
    folder_repo(hub, tmp_path)
    pull("acme/tiny", progress=False)
    before = len(hub.log)
    pull("acme/tiny", progress=False, verify=True)
    assert len(hub.log) > before
