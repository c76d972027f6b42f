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
