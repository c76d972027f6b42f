"""The run directory: what is refused, what is kept."""

import json
from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.config.schema import Config, DataConfig, ModelConfig, RunConfig, WeightedFile
from megarl.errors import ConfigError
from megarl.record.recorder import RunRecorder


def config(
    tmp_path: Path, *, name: str = "a", model: str = "elsewhere", train: tuple[str | WeightedFile, ...] = ()
) -> Config:
    return Config(
        run=RunConfig(name=name, dir=str(tmp_path)), model=ModelConfig(path=model), data=DataConfig(train=train)
    )


def finished_run(tmp_path: Path) -> Path:
    root = RunRecorder(config(tmp_path)).paths.root
    (root / "metrics.jsonl").write_text("")
    return root


def test_the_resolved_configuration_and_versions_are_kept(tmp_path: Path) -> None:
    paths = RunRecorder(config(tmp_path)).paths
    assert load_config(paths.config) == config(tmp_path)
    assert json.loads(paths.versions.read_text())["ray"].startswith("2.")


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    root = finished_run(tmp_path)
    with pytest.raises(
        ConfigError, match=r"already holds a run; choose another run\.name, or pass --resume or --overwrite"
    ):
        RunRecorder(config(tmp_path))
    (root / "old").write_text("x")
    RunRecorder(config(tmp_path), overwrite=True)
    assert not (root / "old").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "a/../.."])
def test_a_run_name_is_one_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: got .* expected a single directory name"):
        RunRecorder(config(tmp_path, name=name))


def test_overwriting_never_removes_the_inputs(tmp_path: Path) -> None:
    root = finished_run(tmp_path)
    (root / "export").mkdir()
    data = str(root / "data.parquet")
    for changed in ({"model": str(root / "export")}, {"train": (data,)}, {"train": (WeightedFile(path=data),)}):
        with pytest.raises(ConfigError, match="which --overwrite removes"):
            RunRecorder(config(tmp_path, **changed), overwrite=True)  # type: ignore[arg-type]
    assert (root / "export").is_dir()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: cannot make .*file/a"):
        RunRecorder(Config(run=RunConfig(name="a", dir=str(tmp_path / "file")), model=ModelConfig(path="m")))
