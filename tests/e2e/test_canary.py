"""The canary notices what goes wrong in a sync, and nothing where nothing does; runs with it have the same samples."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e import canary_run
from tests.e2e.canary_run import MATRIX, Round
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.kill_resume import SCHEDULES, SmallRun, differences, make_inputs
from tests.helpers.rank_pool import RankPool

ALONE = "actor.layout={tp: 1, dp: 2, sequence_parallel: false}"


def rounds_of(directory: Path, faults: list[str], *settings: str, engine: int = 0) -> dict[str, list[Round]]:
    """The rounds of a cluster, by their fault, those without one under `none`."""
    model = make_checkpoint(directory / "model", tied=True)
    with RankPool(1, timeout_s=500.0) as pool:
        rounds = pool.run(canary_run.run, str(model), settings, faults, engine, str(directory))[0]
    assert [each.fault for each in rounds] == faults
    return {fault: [each for each in rounds if each.fault == fault] for fault in faults}


def assert_fine(rounds: list[Round]) -> None:
    """float32 rounding of two implementations."""
    assert [each.error for each in rounds] == [""] * len(rounds)
    assert all(
        each.metrics["canary/max_abs_diff"] < 1e-5 and not each.metrics["canary/cached_tokens"] for each in rounds
    )


def test_one_of_two_engines_gets_wrong_weights(tmp_path: Path) -> None:
    weights = ["dropped slice", "wrong scale", "high bit", "left behind"]
    faults = ["none", *weights, "none", "stale cache", "older claim", "low bit", "verified low bit", "none"]
    found = rounds_of(tmp_path, faults, ALONE, "rollout.engine.num_engines=2", engine=1)
    assert_fine(found["none"])
    for fault in weights:
        error = found[fault][0].error
        version = faults.index(fault) + 1
        assert error.startswith(f"MismatchError: canary: after the sync of version {version}, engine 1 differs"), fault
        assert "engine 0" not in error
        if fault == "left behind":
            assert "of its weights changed when they were sent again" in error
        else:
            assert f"1 of its weights changed when they were sent again: {MATRIX} of worker 0." in error
    stale = found["stale cache"][0].error
    # Four prompts with two blocks of 32 tokens each.
    assert "engine 1 differs from the trainer" in stale
    assert "it had 256 tokens of the prompts in its prefix cache" in stale
    assert "none of its weights changed" in stale
    assert "engine 1 claims to have sampled with version 7" in found["older claim"][0].error
    # No log-prob shows it, but a checksum does.
    assert_fine(found["low bit"])
    assert found["verified low bit"][0].error.startswith("WeightSyncError: 1 tensors differ")


def test_two_workers_get_each_others_part(tmp_path: Path) -> None:
    found = rounds_of(tmp_path, ["none", "swapped ranks", "none"], "rollout.engine.tp=2")
    assert_fine(found["none"])
    error = found["swapped ranks"][0].error
    assert f"2 of its weights changed when they were sent again: {MATRIX} of worker 0, {MATRIX} of worker 1." in error


def test_an_engine_keeps_the_adapters_of_the_last_step(tmp_path: Path) -> None:
    lora = "actor.lora={rank: 4, alpha: 16, sync: adapter}"
    apart = ("actor.layout={tp: 1, sequence_parallel: false}", "placement.mode=split", "actor.optimizer.lr=0.01")
    found = rounds_of(tmp_path, ["none", "none", "last adapter", "stale cache", "none"], lora, *apart)
    assert_fine(found["none"])
    error = found["last adapter"][0].error
    assert "engine 0 differs from the trainer" in error
    assert ".lora_a_stacked.0 of worker 0" in error
    assert "it had 256 tokens" in found["stale cache"][0].error


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("canary"))


def finished(run: SmallRun) -> SmallRun:
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    return run


def test_samples_are_the_same_to_the_bit(inputs: Path) -> None:
    settings = ("trainer.total_steps=4", "data.val=[]", "checkpoint.every_steps=0")
    run = finished(SmallRun(inputs=inputs, name="with", settings=(*settings, "sync.canary_every=1")))
    plain = finished(replace(run, name="without", settings=(*settings, "sync.canary_every=0")))
    assert differences(run, plain) == []
    # The last version trains nothing.
    assert ["canary/seconds" in record.metrics for record in run.records()] == [False, True, True, True]


def test_twenty_steps_without_a_fault(inputs: Path) -> None:
    """With a prefix cache, and samples under way at every sync."""
    settings = (*SCHEDULES["one_step_off"], "run.deterministic=false", "trainer.total_steps=20", "data.val=[]")
    settings = (*settings, "checkpoint.every_steps=0", "sync.canary_every=1")
    run = finished(SmallRun(inputs=inputs, name="long", settings=settings))
    largest = [record.metrics.get("canary/max_abs_diff", 1.0) for record in run.records()[1:]]
    assert len(largest) == 19
    assert max(largest) < 1e-5


FLOAT8 = ("rollout.engine.quantization=fp8_per_channel", "algo.correction.name=tis_upper")
DRAFTS = ("rollout.engine.speculation={method: ngram, num_tokens: 3, min_ngram_tokens: 1}",)
# Settings of the engine → a bound in nats on single tokens, whose rounding is larger than that of means.
ENGINES = {
    "float8": (FLOAT8, 0.2),
    "drafts": (DRAFTS, 1e-5),
    "drafts in float8": ((*DRAFTS, *FLOAT8), 0.2),
    "bfloat16": (("model.dtype=bfloat16",), 0.05),
}


@pytest.mark.parametrize("name", list(ENGINES))
def test_engines_that_round_or_draft(inputs: Path, name: str) -> None:
    engine, bound = ENGINES[name]
    settings = ("trainer.total_steps=4", "data.val=[]", "checkpoint.every_steps=0", "sync.canary_every=1")
    run = SmallRun(inputs=inputs, name=name, settings=(*settings, "run.deterministic=false", *engine))
    rounds = [record.metrics for record in finished(run).records()[1:]]
    assert len(rounds) == 3
    assert all(each["canary/max_abs_diff"] < bound and not each["canary/cached_tokens"] for each in rounds)
