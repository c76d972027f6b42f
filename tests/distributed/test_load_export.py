"""What is loaded is written again bit for bit, in every layout, and transformers reads it."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.train.export import export_model
from megarl.types.messages import Role, RoleSpec, StoreResult
from megarl.weights import safetensors_map
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import weight_specs
from tests.helpers import ranks
from tests.helpers.hf_models import assert_same_bits, read_tensors
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "tp1": LayoutConfig(tp=1),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "dp2": LayoutConfig(dp=2),
}
SHARD_BYTES = 60_000

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]


class PoolWriters:
    """A pool's ranks as `export_model` wants them; keeps what each rank wrote and its parameters' shapes."""

    def __init__(self, pool: RankPool, layout: LayoutConfig, model: ModelConfig) -> None:
        self._pool, self._actor, self._model = pool, ActorConfig(layout=layout), model
        self.role = RoleSpec(role=Role.ACTOR, model=model, settings=self._actor)

    def store_weights(self, files: Sequence[Path], *, role: Role = Role.ACTOR) -> StoreResult:
        assert role is Role.ACTOR
        paths = [str(file) for file in files]
        results = self._pool.run(ranks.load_and_store, self._actor, self._model, paths)
        self.by_rank = [stored for stored, _ in results]
        self.shapes = [shapes for _, shapes in results]
        return functools.reduce(StoreResult.merged, self.by_rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_export_equals_what_was_loaded(
    rank_pool: GetPool,
    checkpoint: GetCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    files: str,
    dtype: str,
) -> None:
    tied = dtype == "float32"
    source = checkpoint(tied=tied, dtype=dtype, max_shard_size=SHARD_BYTES if files == "several" else "50GB")
    assert (len(list(source.glob("*.safetensors"))) > 2) == (files == "several")
    expected = read_tensors(source)
    assert ("lm_head.weight" in expected) == (not tied)
    if files == "several":
        plan = functools.partial(safetensors_map.plan_files, max_bytes=SHARD_BYTES)
        monkeypatch.setattr(safetensors_map, "plan_files", plan)

    config = LAYOUTS[layout]
    model = ModelConfig(path=str(source), dtype=dtype)  # type: ignore[arg-type]
    writers = PoolWriters(rank_pool(config.world_size), config, model)
    target = tmp_path / "export"
    export_model(writers, writers.role, target)

    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (len(list(target.glob("*.safetensors"))) > 2) == (files == "several")
    assert_same_bits(read_tensors(target), expected)
    if files == "several":
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in expected.values())
    # Two ranks share the work; with data parallelism each writes whole tensors.
    for stored in writers.by_rank:
        assert sum(stored.num_elements.values()) > 0.2 * sum(t.numel() for t in expected.values())

    loaded, loading = AutoModelForCausalLM.from_pretrained(target, dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert_same_bits(
        {name: value for name, value in loaded.state_dict().items() if not tied or name != "lm_head.weight"}, expected
    )
    assert loaded.config.tie_word_embeddings == tied


def test_ranks_hold_parts_of_the_model(rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path: Path) -> None:
    """The test above would also pass if every rank held everything."""
    source = checkpoint(tied=False)
    model = ModelConfig(path=str(source), dtype="float32")
    writers = PoolWriters(rank_pool(2), LayoutConfig(tp=2), model)
    export_model(writers, writers.role, tmp_path / "export")
    for shapes in writers.shapes:
        # 264 tokens padded to 2 × 256 rows; 4 query and 2 key/value heads of 32; gate and up of 96.
        assert shapes["embedding.word_embeddings.weight"] == (256, 64)
        assert shapes["output_layer.weight"] == (256, 64)
        assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (128, 64)
        assert shapes["decoder.layers.1.mlp.linear_fc1.weight"] == (96, 64)
        assert shapes["decoder.layers.1.mlp.linear_fc2.weight"] == (64, 48)
        assert shapes["decoder.layers.1.self_attention.q_layernorm.weight"] == (32,)
    first, second = (stored.num_elements for stored in writers.by_rank)
    assert (first["lm_head.weight"], second["lm_head.weight"]) == (256 * 64, 8 * 64)
    assert "model.norm.weight" not in second


def test_checksums_do_not_depend_on_the_layout(rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path: Path) -> None:
    source = checkpoint(tied=False)
    spec, model = read_model_spec(source), ModelConfig(path=str(source), dtype="float32")
    sums = []
    for name, layout in LAYOUTS.items():
        files = safetensors_map.create_model_files(tmp_path / name, weight_specs(spec, "float32"))
        sums.append(PoolWriters(rank_pool(layout.world_size), layout, model).store_weights(files).checksums)
    assert sums[0].keys() == spec.expected_tensors().keys()
    assert sums[0] == sums[1] == sums[2]


def test_a_tied_checkpoint_may_carry_the_head(rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path: Path) -> None:
    source = checkpoint(tied=True)
    expected = read_tensors(source)
    with_head = tmp_path / "with-head"
    with_head.mkdir()
    (with_head / "config.json").write_text((source / "config.json").read_text())
    save_file({**expected, "lm_head.weight": torch.zeros(264, 64)}, with_head / "model.safetensors")
    model = ModelConfig(path=str(with_head), dtype="float32")
    writers = PoolWriters(rank_pool(1), LayoutConfig(), model)
    export_model(writers, writers.role, tmp_path / "export")
    assert_same_bits(read_tensors(tmp_path / "export"), expected)
