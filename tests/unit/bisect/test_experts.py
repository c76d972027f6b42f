"""Faults of experts are named, against transformers' models in the places of engine and trainer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.bisect.rules import Weights
from megarl.bisect.search import ENGINE, TRAINER, Discrepancy, search
from tests.helpers.hf_models import VOCAB_SIZE, make_model
from tests.helpers.recorded_passes import make_row, record_transformers

ROW = make_row(40, VOCAB_SIZE)
FLOAT32 = {ENGINE: "float32", TRAINER: "float32"}
Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.2.mlp.experts"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    root = tmp_path_factory.mktemp("models")

    def model(family: str, seed: int) -> Path:
        path = root / f"{family}-{seed}"
        if not path.exists():
            make_model(path, family, tied=False, seed=seed)
        return path

    return model


def found(models: Callable[[str, int], Path], family: str, faulty: Path | None = None) -> Discrepancy | None:
    model, older = models(family, 0), models(family, 1)
    recorded = {ENGINE: record_transformers(faulty or model, ROW), TRAINER: record_transformers(model, ROW)}
    return search(Weights.read(model), recorded, dtypes=FLOAT32, older=[Weights.read(older)])


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "qwen2_moe", "mixtral", "granitemoe", "glm4_moe", "minimax_m2", "deepseek_v2", "deepseek_v3"],
)
def test_nothing_is_named_where_nothing_is_wrong(models: Callable[[str, int], Path], family: str) -> None:
    assert found(models, family) is None


def _swap_all(tensors: Tensors, _: Tensors) -> None:
    for name in [each for each in tensors if each.startswith(EXPERTS) and "gate_proj" in each]:
        up = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[up] = tensors[up], tensors[name]


def _swap_one(tensors: Tensors, _: Tensors) -> None:
    gate, up = f"{EXPERTS}.1.gate_proj.weight", f"{EXPERTS}.1.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _stale_one(tensors: Tensors, older: Tensors) -> None:
    for kind in ("gate", "up", "down"):
        tensors[f"{EXPERTS}.3.{kind}_proj.weight"] = older[f"{EXPERTS}.3.{kind}_proj.weight"]


def _stale_router(tensors: Tensors, older: Tensors) -> None:
    tensors["model.layers.2.mlp.gate.weight"] = older["model.layers.2.mlp.gate.weight"]


def _other_expert(tensors: Tensors, _: Tensors) -> None:
    for kind in ("gate", "up", "down"):
        tensors[f"{EXPERTS}.3.{kind}_proj.weight"] = tensors[f"{EXPERTS}.0.{kind}_proj.weight"].clone()


def _turned(tensors: Tensors, _: Tensors) -> None:
    names = [each for each in tensors if each.startswith(EXPERTS)]
    was = {name: tensors[name].clone() for name in names}
    for name in names:
        number = int(name.removeprefix(f"{EXPERTS}.").split(".")[0])
        tensors[name] = was[name.replace(f"experts.{number}.", f"experts.{(number + 3) % 6}.")]


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (_swap_all, "gate and up", "gate and up of all routed experts are interchanged"),
        (_swap_one, "gate and up", "expert 1: gate and up are interchanged"),
        (_stale_one, "stale weight", "expert 3: as in"),
        (_stale_router, "stale weight", "router, as in"),
        (_other_expert, "misplaced weight", "expert 3: as expert 0"),
        (_turned, "misplaced weight", "each expert has the weights of the one that is 3 further on"),
    ],
)
def test_wrong_weights_are_named(
    models: Callable[[str, int], Path], spoil: Callable[[Tensors, Tensors], None], name: str, words: str, tmp_path: Path
) -> None:
    model, older = models("qwen3_moe", 0), models("qwen3_moe", 1)
    tensors = load_file(model / "model.safetensors")
    assert f"{EXPERTS}.5.up_proj.weight" in tensors, "six experts"
    spoil(tensors, load_file(older / "model.safetensors"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    finding = found(models, "qwen3_moe", tmp_path)
    assert finding is not None
    assert (str(finding.place), finding.side) == ("layer 2, output of the MLP", ENGINE)
    assert finding.cause is not None
    assert finding.cause.name == name
    assert finding.cause.words.startswith(words)


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("qwen2_moe", "norm_topk_prob", True, "weights of a token's experts do not sum to 1 in this model"),
        ("glm4_moe", "routed_scaling_factor", 1.0, "routed experts are not multiplied by"),
    ],
)
def test_other_routing_is_named(
    models: Callable[[str, int], Path], family: str, key: str, value: object, words: str, tmp_path: Path
) -> None:
    model = models(family, 0)
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    config = json.loads((model / "config.json").read_text())
    assert config[key] != value
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    finding = found(models, family, tmp_path)
    assert finding is not None
    assert finding.cause is not None
    assert finding.cause.words.startswith(words)
