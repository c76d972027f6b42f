"""There and back is the same bit for bit, whoever writes it; what does not fit is refused; what was begun continues."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megarl.config import Config
from megarl.config.schema import ModelConfig
from megarl.convert import commands, engine
from megarl.convert import plan as plan_module
from megarl.convert.commands import hf_to_mcore, mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.convert.readers import write_index
from megarl.errors import ConfigError, DataError
from megarl.record.checkpoints import RunState
from megarl.types import AlgoState
from megarl.weights.dist_index import read_index
from tests.helpers.hf_models import DENSE, WITH_EXPERTS, assert_same_tensors, make_model, read_tensors
from tests.helpers.hostile_pickles import spoil_rng, spoil_within_metadata
from tests.helpers.vision import make_vision_model

INDEX = "model.safetensors.index.json"


def settings(out: Path, *, num_workers: int = 1, overwrite: bool = False) -> ConvertSettings:
    return ConvertSettings(out=out, num_workers=num_workers, overwrite=overwrite)


def file_bytes(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a dozen rows in a piece, and several output files."""
    monkeypatch.setattr(plan_module, "PIECE_BYTES", 2500)
    monkeypatch.setattr(plan_module, "MAX_FILE_BYTES", 200_000)


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was made durable, in name only: on a slow disk that takes longer than all the rest."""
    paths: list[Path] = []
    monkeypatch.setattr(engine, "fsync", paths.append)
    return paths


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files with an index."""
    path = make_model(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False, max_shard_size=100_000)
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def model(qwen2: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(qwen2, tmp_path / "model"))


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        # By turns, each dense family is tied or not; the other half is long.
        pytest.param(family, tied, marks=[] if tied == bool(number % 2) else pytest.mark.long)
        for number, family in enumerate(DENSE)
        for tied in (True, False)
    ]
    + [(family, False) for family in WITH_EXPERTS],
)
@pytest.mark.usefixtures("small_pieces")
def test_there_and_back(tmp_path: Path, family: str, tied: bool) -> None:
    source = make_model(tmp_path / "hf", family, tied=tied, max_shard_size=100_000)
    hf_to_mcore(source, settings(tmp_path / "dist"))
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert len(list((tmp_path / "dist").glob("*.distcp"))) > 1
    assert_same_tensors(tmp_path / "back", source)
    index, expected = (json.loads((path / INDEX).read_text()) for path in (tmp_path / "back", source))
    assert index["weight_map"] == expected["weight_map"]
    assert index["metadata"]["total_size"] == expected["metadata"]["total_size"]
    others = {p.name for p in source.iterdir() if p.suffix != ".safetensors"} - {INDEX}
    assert {"config.json", "tokenizer.json"} <= others
    for name in others:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "dist", "hf"]


@pytest.mark.usefixtures("small_pieces")
def test_experts_with_inputs_first_there_and_back(tmp_path: Path) -> None:
    """In between, gates come before ups, and outputs before inputs."""
    source, name = make_vision_model(tmp_path / "hf", "qwen3_vl_moe"), "mlp.experts.experts.linear_fc1.weight"
    hf_to_mcore(source, settings(tmp_path / "dist"))
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert_same_tensors(tmp_path / "back", source)
    published = read_tensors(source)["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    dcp_to_torch_save(tmp_path / "dist", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)[f"decoder.layers.{name}"]
    assert torch.equal(found[1], published.mT)


@pytest.mark.usefixtures("small_pieces")
def test_bytes_do_not_depend_on_the_processes(tmp_path: Path, qwen2: Path) -> None:
    for n in (1, 3):
        hf_to_mcore(qwen2, settings(tmp_path / f"dist{n}", num_workers=n))
        mcore_to_hf(tmp_path / f"dist{n}", settings(tmp_path / f"back{n}", num_workers=n))
    assert file_bytes(tmp_path / "dist1") == file_bytes(tmp_path / "dist3")
    assert file_bytes(tmp_path / "back1") == file_bytes(tmp_path / "back3")


def test_all_is_durable_before_it_has_its_name(tmp_path: Path, qwen2: Path, synced: list[Path]) -> None:
    hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    names = {path.name for path in (tmp_path / "dist").iterdir()}
    assert {path.name for path in synced} == {*names, "dist.partial", tmp_path.name}
    assert {".metadata", "__0_0.distcp", "common.pt", "config.json"} < names
    # The rename itself comes last.
    assert synced[-1] == tmp_path


def test_every_source_byte_is_read_once(tmp_path: Path, qwen2: Path) -> None:
    size = sum(tensor.nbytes for tensor in read_tensors(qwen2).values())
    forth = hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    assert forth is not None
    assert forth.num_bytes_read == size


def test_types_are_cast_and_config_says_so(tmp_path: Path, qwen2: Path) -> None:
    hf_to_mcore(qwen2, settings(tmp_path / "dist"), dtype="bfloat16")
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    got = read_tensors(tmp_path / "back")
    for name, tensor in read_tensors(qwen2).items():
        assert torch.equal(got[name], tensor.to(torch.bfloat16)), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "wide"), dtype="float32")
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "wide").values()} == {torch.float32}


def test_a_critic_keeps_its_head(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen3", tied=True)
    config = json.loads((source / "config.json").read_text())
    critic = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    (source / "config.json").write_text(json.dumps(config | critic))
    save_file({**read_tensors(source), "score.weight": torch.randn(1, 48)}, source / "model.safetensors")
    hf_to_mcore(source, settings(tmp_path / "dist"))
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert_same_tensors(tmp_path / "back", source)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_run_knows_its_model(tmp_path: Path, qwen2: Path) -> None:
    step = tmp_path / "checkpoints" / "step_000010"
    hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    state = RunState(
        command="train",
        step=10,
        num_optimizer_steps=10,
        sampler={},
        algo=AlgoState(kl_coef=0.0),
        source={},
        score=None,
        config=Config(model=ModelConfig(path=str(qwen2))),
    )
    step.mkdir(parents=True)
    (step / "actor").mkdir()
    for file in [*(tmp_path / "dist").glob("*.distcp"), tmp_path / "dist" / ".metadata"]:
        shutil.copy(file, step / "actor")
    with pytest.raises(ConfigError, match=r"actor: has no config.json; name the directory of the model with --model"):
        mcore_to_hf(step / "actor", settings(tmp_path / "back"))
    (step / "state.json").write_text(state.to_json())
    with pytest.raises(DataError, match="has no COMPLETE file"):
        mcore_to_hf(step / "actor", settings(tmp_path / "back"))
    (step / "COMPLETE").touch()
    mcore_to_hf(step / "actor", settings(tmp_path / "back"))
    assert_same_tensors(tmp_path / "back", qwen2)
    # No weights, but of a checkpoint that is somebody else's.
    mark = tmp_path / "mark"
    file = spoil_rng(step / "actor", mark)
    with pytest.raises(DataError, match=rf"{file}: is more than data"):
        mcore_to_hf(step / "actor", settings(tmp_path / "again"))
    assert not mark.exists()


def edit_config(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def first_file(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


def spoil_width(model: Path) -> None:
    edit_config(model, intermediate_size=41)


def spoil_depth(model: Path) -> None:
    edit_config(model, num_hidden_layers=6, layer_types=["full_attention"] * 6)


def spoil_family(model: Path) -> None:
    edit_config(model, architectures=["Qwen3ForCausalLM"], head_dim=8)


def spoil_dtype(model: Path) -> None:
    edit_config(model, dtype="bfloat16")


def cut_short(model: Path) -> None:
    os.truncate(first_file(model), first_file(model).stat().st_size - 1)


def cut_in_header(model: Path) -> None:
    os.truncate(first_file(model), 100)


def lose_file(model: Path) -> None:
    first_file(model).unlink()


def add_tensor(model: Path) -> None:
    save_file({**load_file(first_file(model)), "model.extra": torch.zeros(2)}, first_file(model))


def double_tensor(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        save_file({**load_file(file), "model.norm.weight": torch.zeros(48)}, file)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_width, r"gate_proj.weight: expected shape \(41, 48\), got \(40, 48\); give the config.json of this"),
        (spoil_depth, r"missing: model.layers.5.input_layernorm.weight, .* and 9 more; got but not expected: none"),
        (spoil_family, r"missing: .*k_norm.weight.*; got but not expected: .*k_proj.bias"),
        (spoil_dtype, r"dtype: expected bfloat16, as config.json says, got \['float32'\]; correct dtype"),
        (cut_short, r"tensor .* ends at byte \d+ of \d+; copy the model again"),
        (cut_in_header, r"header of \d+ bytes exceeds the file; copy the model again"),
        (lose_file, r"model-00001-of-\d+.safetensors does not exist"),
        (add_tensor, r"missing: none; got but not expected: model.extra; "),
        (double_tensor, r"model.norm.weight is also in .*; copy the model again"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    tmp_path: Path, model: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(model)
    # Again it is the same: nothing was left behind that another start could take for a beginning.
    for _ in range(2):
        with pytest.raises((ConfigError, DataError), match=message):
            hf_to_mcore(model, settings(tmp_path / "dist"))
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, qwen2: Path, model: Path) -> None:
    hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    spoil_depth(model)
    message = r"linear_qkv.layer_norm_weight: expected shape \(6, 48\), got \(5, 48\); give the config.json"
    with pytest.raises(DataError, match=message):
        mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"), model=model)
    file = tmp_path / "dist" / "__0_0.distcp"
    os.truncate(file, 1000)
    with pytest.raises(
        DataError, match=r"__0_0.distcp: expected at least \d+ bytes, got 1000; copy the checkpoint again"
    ):
        mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    file.unlink()
    with pytest.raises(DataError, match=r"__0_0.distcp: does not exist; copy the checkpoint again"):
        mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert not list(tmp_path.glob("back*"))


def rename_keys(dist: Path, names: Mapping[str, str]) -> None:
    """Give global tensors other keys, as another kind of layers would have written them."""
    tensors, _ = read_index(dist)
    write_index(dist, {names.get(key, key): tensor for key, tensor in tensors.items()}, {})


def test_keys_of_other_layers_are_read(tmp_path: Path, qwen2: Path) -> None:
    hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    layers = "decoder.layers."
    names = {
        f"{layers}self_attention.linear_qkv.layer_norm_weight": f"{layers}input_layernorm.weight",
        f"{layers}mlp.linear_fc1.layer_norm_weight": f"{layers}pre_mlp_layernorm.weight",
    }
    rename_keys(tmp_path / "dist", names)
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert_same_tensors(tmp_path / "back", qwen2)
    rename_keys(tmp_path / "dist", {"output_layer.weight": "head.weight"})
    message = r"missing: output_layer.weight; got but not expected: head.weight; "
    with pytest.raises(DataError, match=message):
        mcore_to_hf(tmp_path / "dist", settings(tmp_path / "other"))


@pytest.mark.parametrize("stacked", [False])
def test_layers_with_experts_are_read_stacked_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool
) -> None:
    """Megatron stacks them where one number, not a list, says which layers have experts."""
    source = make_model(tmp_path / "hf", "qwen3_moe", tied=False)
    if not stacked:
        original = commands.model_parameters
        monkeypatch.setattr(commands, "model_parameters", lambda spec, **k: original(spec, **{**k, "stacked": False}))
    hf_to_mcore(source, settings(tmp_path / "dist"))
    tensors, _ = read_index(tmp_path / "dist")
    layers, shape = ("layers", (5, 6, 40, 48)) if stacked else ("layers.4", (6, 40, 48))
    assert tensors[f"decoder.{layers}.mlp.experts.experts.linear_fc1.weight"].spec.shape == shape
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert_same_tensors(tmp_path / "back", source)


def test_metadata_that_could_run_code_is_refused(tmp_path: Path, qwen2: Path) -> None:
    hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    mark = tmp_path / "mark"
    spoil_within_metadata(tmp_path / "dist", mark)
    with pytest.raises(DataError, match=r"\.metadata: .*it names posix\.open"):
        mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    assert not mark.exists()


def test_what_exists_is_replaced_only_on_request(tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "old").touch()
    with pytest.raises(ConfigError, match=r"--out: .*dist exists; .* --overwrite"):
        hf_to_mcore(qwen2, settings(tmp_path / "dist"))
    hf_to_mcore(qwen2, settings(tmp_path / "dist", overwrite=True))
    assert not (tmp_path / "dist" / "old").exists()


def test_biases_of_routers_stay_wide(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "deepseek_v3", tied=False)
    hf_to_mcore(source, settings(tmp_path / "dist"), dtype="bfloat16")
    mcore_to_hf(tmp_path / "dist", settings(tmp_path / "back"))
    expected, got = read_tensors(source), read_tensors(tmp_path / "back")
    biases = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert len(biases) == 4
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor if name in biases else tensor.to(torch.bfloat16)), name
