"""`megarl convert` as a command: what verification finds, what a dry run prints, exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.convert import engine
from megarl.convert import plan as plan_module
from megarl.convert.commands import hf_to_mcore, mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.convert.verify import verify
from tests.helpers.hf_models import make_model, read_tensors

GATE = "model.layers.2.mlp.gate_proj.weight"


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For slow disks."""
    monkeypatch.setattr(engine, "fsync", lambda path: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


@pytest.fixture(scope="module")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "dist"
    main(["convert", "hf-to-mcore", str(source), "--out", str(out), "--workers", "1"])
    return out


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(source, tmp_path / "copy"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], str]]:
    """Exit code, lines on stdout, stderr without the progress."""

    def run(*command: object) -> tuple[int, list[str], str]:
        code = 0
        try:
            main(["convert", *map(str, command)])
        except SystemExit as leaving:
            code = int(str(leaving.code))
        output = capsys.readouterr()
        errors = [line for line in output.err.splitlines() if "MiB " not in line]
        return code, output.out.splitlines(), "\n".join(errors)

    return run


Run = Callable[..., tuple[int, list[str], str]]


def change(model: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors")


def test_equal_checkpoints(source: Path, copy: Path, dist: Path, run: Run) -> None:
    for first, second in ((source, copy), (source, dist), (dist, source), (dist, dist)):
        assert run("verify", first, second, "--workers", 2) == (0, [SUMMARY], "")


# 517·48 twice, five layers of 48·(72 + 24 + 24) + 72·48 + 3·40·48 + 2·48 + 2·12, and 48; tensors of 4 bytes.
SUMMARY = "equal, bit for bit, and finite: 58 tensors, 0.48 MiB"


def test_one_flipped_bit_is_found(
    source: Path, copy: Path, dist: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "PIECE_BYTES", 1000)
    value = float(load_file(source / "model.safetensors")[GATE][31, 7])

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE].view(torch.int32)[31, 7] ^= 1

    change(copy, flip)
    other = float(load_file(copy / "model.safetensors")[GATE][31, 7])
    for first in (source, dist):
        code, lines, _ = run("verify", first, copy, "--workers", 1)
        assert code == 1
        assert lines[0] == f"{GATE}: 1 elements differ, the first at [31, 7]: {value!r} and {other!r}"
        assert lines[1] == "not equal: 1 problems; compared 58 tensors, 0.48 MiB"


def test_a_flipped_bit_in_a_torch_dist_file_is_found(source: Path, dist: Path, tmp_path: Path, run: Run) -> None:
    spoiled = Path(shutil.copytree(dist, tmp_path / "dist"))
    raw = load_file(source / "model.safetensors")[GATE][31:32].numpy().tobytes()
    file = spoiled / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    assert content.count(raw) == 1
    content[content.index(raw)] ^= 1
    file.write_bytes(content)
    code, lines, _ = run("verify", source, spoiled, "--workers", 1)
    assert (code, lines[0].startswith(f"{GATE}: 1 elements differ, the first at [31, 0]: ")) == (1, True)


def test_what_is_not_a_number_is_found_in_both(copy: Path, run: Run) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE][3, 4:6] = torch.nan
        tensors["model.norm.weight"][0] = torch.inf

    change(copy, spoil)
    code, lines, _ = run("verify", copy, copy, "--workers", 1)
    assert code == 1
    assert lines == [
        f"{GATE}: 2 and 2 elements are NaN or infinite",
        "model.norm.weight: 1 and 1 elements are NaN or infinite",
        "not equal: 2 problems; compared 58 tensors, 0.48 MiB",
    ]


def test_large_finite_numbers_are_finite(copy: Path, run: Run) -> None:
    """Their sum is not."""
    change(copy, lambda tensors: tensors[GATE].fill_(3e38))
    assert run("verify", copy, copy, "--workers", 1)[0] == 0


def test_other_keys_and_types_are_named(source: Path, copy: Path, tmp_path: Path, run: Run) -> None:
    tied = make_model(tmp_path / "tied", "qwen3", tied=True)
    code, lines, _ = run("verify", source, tied, "--workers", 1)
    assert (code, lines[0]) == (1, f"missing: lm_head.weight is not in {tied}")
    assert run("verify", tied, source, "--workers", 1)[1][0] == f"unexpected: lm_head.weight is not in {tied}"
    change(copy, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.bfloat16)}))
    code, lines, _ = run("verify", source, copy, "--workers", 1)
    expected = "model.norm.weight: expected (48,) of torch.float32, got (48,) of torch.bfloat16"
    assert (code, lines[0]) == (1, expected)


def test_bad_input_is_one_line_and_exit_code_2(source: Path, dist: Path, copy: Path, tmp_path: Path, run: Run) -> None:
    code, lines, error = run("verify", source, tmp_path)
    assert (code, lines) == (2, [])
    assert error.startswith(f"error: {tmp_path}: neither a Hugging Face directory")
    assert run("hf-to-mcore", dist, "--out", tmp_path / "out")[2].endswith("use mcore-to-hf to convert it back")
    assert run("mcore-to-hf", source, "--out", tmp_path / "out")[2].endswith("use hf-to-mcore to convert it")
    error = run("hf-to-mcore", source, "--out", tmp_path / "out", "--workers", 0)[2]
    assert error == "error: --workers: got 0, expected at least 1"
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 519}))
    code, _, error = run("hf-to-mcore", copy, "--out", tmp_path / "out")
    assert code == 2
    assert "model.embed_tokens.weight: expected shape (519, 48), got (517, 48)" in error
    assert not list(tmp_path.glob("out*"))


def test_a_dry_run_prints_sizes_and_writes_nothing(source: Path, dist: Path, tmp_path: Path, run: Run) -> None:
    code, lines, _ = run("hf-to-mcore", source, "--out", tmp_path / "out", "--dry-run", "--workers", 3)
    assert code == 0
    # 640 rows of 48 float32 values, twice; five layers of 120 rows.
    rows = [line.split() for line in lines]
    qkv = "decoder.layers.self_attention.linear_qkv.weight"
    assert ["embedding.word_embeddings.weight", "1", "640", "×", "48", "float32", "0.12"] in rows
    assert [qkv, "1", "5", "×", "120", "×", "48", "float32", "0.11"] in rows
    assert any(line.startswith("memory   at most 0.12 MiB of tensors in each of 3 processes") for line in lines)
    assert lines[-1] == "Nothing was written (--dry-run)."
    code, lines, _ = run("mcore-to-hf", dist, "--out", tmp_path / "out", "--dry-run", "--dtype", "bfloat16")
    rows = [line.split() for line in lines]
    assert ["model.layers.*.mlp.gate_proj.weight", "5", "40", "×", "48", "bfloat16", "0.02"] in rows
    assert not list(tmp_path.iterdir())


def test_layers_that_predict_further_tokens_are_carried_through_and_compared(tmp_path: Path) -> None:
    """Those that config.json names, byte for byte; one that is missing, or changed, is a difference."""
    source = make_model(tmp_path / "hf", "deepseek_v3", tied=False)
    config = json.loads((source / "config.json").read_text())
    config["num_nextn_predict_layers"] = config["num_mtp_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    last = config["num_hidden_layers"]
    tensors = read_tensors(source)
    further = {
        name.replace(f".{last - 1}.", f".{last}."): tensor + 1
        for name, tensor in tensors.items()
        if name.startswith(f"model.layers.{last - 1}.")
    }
    further[f"model.layers.{last}.eh_proj.weight"] = torch.rand(4, 6)
    save_file({**tensors, **further}, source / "model.safetensors")
    hf_to_mcore(source, ConvertSettings(out=tmp_path / "dist", num_workers=1, overwrite=False))
    mcore_to_hf(tmp_path / "dist", ConvertSettings(out=tmp_path / "back", num_workers=1, overwrite=False))
    back = read_tensors(tmp_path / "back")
    assert back.keys() == {*tensors, *further}
    for other in (tmp_path / "dist", tmp_path / "back"):
        verified = verify(source, other, model=None, num_workers=1)
        assert (verified.problems, verified.num_tensors) == ((), len(back))
    carried = tmp_path / "back" / "model-untrained.safetensors"
    name, other_name = sorted(further)[:2]
    save_file({**further, name: further[name] + 1}, carried)
    assert verify(source, tmp_path / "back", model=None, num_workers=1).problems == (f"{name}: differs",)
    save_file({key: value for key, value in further.items() if key != other_name}, carried)
    index = tmp_path / "back" / "model.safetensors.index.json"
    weight_map = {key: file for key, file in json.loads(index.read_text())["weight_map"].items() if key != other_name}
    index.write_text(json.dumps({"weight_map": weight_map}))
    missing = f"missing: {other_name} is not in {tmp_path / 'back'}"
    assert verify(source, tmp_path / "back", model=None, num_workers=1).problems == (missing,)
