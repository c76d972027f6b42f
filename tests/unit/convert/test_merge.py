"""Adapters are merged into a model's files as W + α/r·B·A in float32, one block of rows at a time."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.config.lora import LoraConfig
from megarl.convert import engine
from megarl.convert import plan as plan_module
from megarl.convert.cli import COMMANDS
from megarl.convert.engine import ConvertSettings
from megarl.convert.merge import merge
from megarl.errors import ConfigError
from megarl.weights.families import read_model_spec
from megarl.weights.peft_files import create_adapter_files
from tests.helpers.hf_models import VOCAB_SIZE, make_model, read_tensors
from tests.helpers.vision import VISION, make_vision_model

PREFIX = "base_model.model."
GetModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen rows in a piece; nothing is made durable."""
    monkeypatch.setattr(plan_module, "PIECE_BYTES", 2500)
    monkeypatch.setattr(engine, "fsync", lambda path: None)


@pytest.fixture
def get(tmp_path: Path) -> GetModel:
    """Makes a model of two layers, beside it `adapters` of which none is 0, and returns the model."""

    def make(
        name: str, *, tied: bool = False, dtype: str = "float32", scale: float = 0.1, scalar: bool = False
    ) -> Path:
        if name in VISION:
            model = make_vision_model(tmp_path / "base", name)
        else:
            model = make_model(tmp_path / "base", name, tied=tied, dtype=dtype, max_shard_size=40_000)
        lora = LoraConfig(rank=4, alpha=6.0)
        file = create_adapter_files(tmp_path / "adapters", read_model_spec(model), lora, "float32", scalar_head=scalar)
        random = torch.Generator().manual_seed(1)
        save_file({n: scale * torch.randn(t.shape, generator=random) for n, t in load_file(file).items()}, file)
        return model

    return make


def settings(out: Path, workers: int = 1) -> ConvertSettings:
    return ConvertSettings(out=out, num_workers=workers)


def expected(model: Path, adapters: Path) -> dict[str, torch.Tensor]:
    """In float64; every adapter has the scale 6/4."""
    found, low = read_tensors(model), load_file(adapters / "adapter_model.safetensors")

    def update(module: str) -> torch.Tensor:
        a, b = (low[f"{PREFIX}{module}.lora_{letter}.weight"].double() for letter in "AB")
        return 1.5 * b @ a

    for name in list(found):
        block, _, kind = name.partition(".experts.")
        if f"{PREFIX}{name.removesuffix('.weight')}.lora_B.weight" in low:
            found[name] = found[name].double() + update(name.removesuffix(".weight"))
        elif kind in ("gate_up_proj", "down_proj"):
            experts = found[name] = found[name].double()
            for i, expert in enumerate(experts):
                gate, up, down = (f"{block}.experts.{i}.{each}_proj" for each in ("gate", "up", "down"))
                if kind == "down_proj":
                    expert += update(down) if expert.shape == update(down).shape else update(down).T
                elif expert.shape[0] == 48:
                    # gpt-oss: in × out, gates and ups in turns.
                    expert[:, 0::2] += update(gate).T
                    expert[:, 1::2] += update(up).T
                else:
                    both = torch.cat([update(gate), update(up)])
                    expert += both if expert.shape == both.shape else both.T
    return found


@pytest.mark.parametrize(
    ("name", "tied"),
    [("phi3", True), ("qwen3_moe", False), ("gpt_oss", False), ("qwen3_5_moe", False), ("qwen3_vl_moe", False)],
)
def test_weights_are_those_of_the_formula(get: GetModel, tmp_path: Path, name: str, tied: bool) -> None:
    model, out = get(name, tied=tied), tmp_path / "out"
    merge(model, tmp_path / "adapters", settings(out, workers=2))
    wanted, got = expected(model, tmp_path / "adapters"), read_tensors(out)
    assert got.keys() == wanted.keys()
    for key, tensor in got.items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor.double(), wanted[key].double(), rtol=2e-7, atol=1e-7, msg=key)
    assert sum(tensor.dtype is torch.float64 for tensor in wanted.values()) > 6
    if name not in VISION:
        AutoModelForCausalLM.from_pretrained(out)
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_is_rounded_once_and_said_so(
    get: GetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum is of float32: it is the nearest of bfloat16 to W + s·B·A."""
    model = get("qwen2", dtype="bfloat16", scale=0.03)
    merge(model, tmp_path / "adapters", settings(tmp_path / "out"))
    wanted, got = expected(model, tmp_path / "adapters"), read_tensors(tmp_path / "out")
    assert all(torch.equal(got[key], tensor.float().bfloat16()) for key, tensor in wanted.items())
    assert "warning: rounding the weights to bfloat16 has changed the updates by " in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    merge(model, tmp_path / "adapters", settings(tmp_path / "exact"), dtype="float32")
    assert "warning" not in capsys.readouterr().out
    for key, tensor in read_tensors(tmp_path / "exact").items():
        torch.testing.assert_close(tensor.double(), wanted[key].double(), rtol=2e-7, atol=1e-7, msg=key)


def test_how_much_rounding_has_changed(get: GetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Updates of 2⁻²⁰ are lost altogether beside weights of bfloat16."""
    model = get("qwen2", dtype="bfloat16", scale=1e-5)
    for file in model.glob("*.safetensors"):
        save_file({name: torch.ones_like(tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    merge(model, tmp_path / "adapters", settings(tmp_path / "out"))
    assert "has changed the updates by 100.0% of their norm; --dtype float32 keeps them" in capsys.readouterr().out


def test_a_reward_model(get: GetModel, tmp_path: Path) -> None:
    model = get("qwen2", scalar=True)
    merge(model, tmp_path / "adapters", settings(tmp_path / "out"))
    wanted, score = expected(model, tmp_path / "adapters"), f"{PREFIX}score.weight"
    wanted["score.weight"] = load_file(tmp_path / "adapters" / "adapter_model.safetensors")[score]
    del wanted["lm_head.weight"]
    got = read_tensors(tmp_path / "out")
    assert got.keys() == wanted.keys()
    assert torch.equal(got["score.weight"], wanted["score.weight"])
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert judge.score.weight.shape == (1, 48)


def test_embedding_and_head(get: GetModel, tmp_path: Path) -> None:
    """The head is replaced and then added to, as peft keeps it; the embedding is added to transposed."""
    model, random = get("qwen2"), torch.Generator().manual_seed(2)
    head, a, b = (torch.randn(s, generator=random) for s in ((VOCAB_SIZE, 48), (2, 48), (VOCAB_SIZE, 2)))
    low = {"A": torch.randn(2, VOCAB_SIZE, generator=random), "B": torch.randn(48, 2, generator=random)}
    tensors = {f"lm_head.lora_{key}.weight": tensor for key, tensor in (("A", a), ("B", b))}
    tensors |= {f"model.embed_tokens.lora_embedding_{key}": tensor for key, tensor in low.items()}
    tensors["lm_head.base_layer.weight"] = head
    save_file({f"{PREFIX}{n}": t for n, t in tensors.items()}, tmp_path / "adapters" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": ["lm_head", "embed_tokens"]}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(config))
    merge(model, tmp_path / "adapters", settings(tmp_path / "out"))
    got, base = read_tensors(tmp_path / "out"), read_tensors(model)
    torch.testing.assert_close(got["lm_head.weight"], head + 0.5 * b @ a)
    embedding = "model.embed_tokens.weight"
    torch.testing.assert_close(got[embedding], base[embedding] + 0.5 * (low["B"] @ low["A"]).T)


def test_adapters_of_some_experts_alone(get: GetModel, tmp_path: Path) -> None:
    model, file = get("gpt_oss"), tmp_path / "adapters" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if ".0.mlp.experts.2.up_proj." not in name}, file)
    missing = r"has no adapters of \['model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight'\]"
    with pytest.raises(ConfigError, match=missing):
        merge(model, tmp_path / "adapters", settings(tmp_path / "out"))
    options = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps({**options, "target_modules": "all-linear"}))
    with pytest.raises(ConfigError, match=r"some parts of model\.layers\.0\.mlp\.experts\.gate_up_proj, but not of"):
        merge(model, tmp_path / "adapters", settings(tmp_path / "out"))


def test_a_dry_run_writes_nothing(get: GetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(get("qwen2"), tmp_path / "adapters", settings(tmp_path / "out"), dry_run=True) is None
    assert "Nothing was written (--dry-run)." in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapters"}


def test_only_weights_of_hugging_face_are_merged_into(get: GetModel, tmp_path: Path) -> None:
    model = get("qwen2")
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        merge(model, model, settings(tmp_path / "out"))
    assert COMMANDS["merge"].arguments["--adapter"]["required"]


@pytest.mark.long
def test_peft_merges_alike(get: GetModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft, which merges the same, is not installed")
    model = get("qwen2")
    merge(model, tmp_path / "adapters", settings(tmp_path / "out"))
    base = AutoModelForCausalLM.from_pretrained(model)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().state_dict()
    for key, tensor in read_tensors(tmp_path / "out").items():
        torch.testing.assert_close(tensor, merged[key], rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.long
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """One tensor of 64 MiB at a time, of a model of 12 of them."""
    paths = [str(tmp_path / name) for name in ("base", "adapters", "out")]
    program = f"""
import resource
from pathlib import Path
from megarl.convert.engine import ConvertSettings
from megarl.convert.merge import merge
base, adapters, out = map(Path, {paths})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge(base, adapters, ConvertSettings(out=out, num_workers=1))
print("MIB", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    sizes = {"hidden_size": 768, "intermediate_size": 8192, "num_attention_heads": 12, "num_key_value_heads": 4}
    model = make_model(tmp_path / "base", "qwen2", tied=True, max_shard_size="50MB", num_hidden_layers=12, **sizes)
    create_adapter_files(tmp_path / "adapters", read_model_spec(model), LoraConfig(rank=8), "float32")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) >> 20
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown = int(done.stdout.split("MIB")[1])
    assert size > 800
    assert grown < 350, f"grew by {grown} MiB for a model of {size} MiB"
