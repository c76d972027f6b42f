"""A whole run on CUDA, from the command to its report: taking turns on one device, and on devices of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.record.metrics import RunPaths, read_metrics
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from tests.e2e import cli_run
from tests.e2e.support import RUN_FILE, SMALL
from tests.helpers.cuda import needs_devices

pytestmark = [pytest.mark.gpu, needs_devices(1)]

NUM_STEPS = 3
SETTINGS = (
    "run.name=run",
    "run.dir=.",
    "model.dtype=bfloat16",
    "actor.layout={tp: 1, sequence_parallel: false}",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=16",
    f"trainer.total_steps={NUM_STEPS}",
    "trainer.prompts_per_step=4",
    "data.val=[]",
    "sync.verify=true",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("placement.offload=true",), id="colocated"),
        pytest.param(("placement.offload=true", "actor.lora={rank: 4}"), id="lora"),
        pytest.param(("placement.offload=true", "actor.share_prefixes=true"), id="forest"),
        pytest.param(("placement.mode=split",), id="split", marks=needs_devices(2)),
        pytest.param(("placement.mode=split", "sync.host_group=device"), id="split, by NCCL", marks=needs_devices(2)),
    ],
)
def test_a_run_ends_with_a_report(checkpoint: Callable[..., Path], tmp_path: Path, settings: tuple[str, ...]) -> None:
    sums = generate(TASKS.get("sums"), tmp_path / "sums", GenerateConfig(seed=0, num_sft=1, num_train=32, num_val=1))
    inputs = (f"model.path={checkpoint(dtype='bfloat16')}", f"data.train=[{sums.train}]")
    run = cli_run.start(tmp_path, "train", str(RUN_FILE), *SMALL, *SETTINGS, *settings, *inputs)
    try:
        assert run.process.wait(500) == 0, run.stderr.read_text()
    finally:
        run.end()
    paths = RunPaths(tmp_path / "run")
    assert paths.report_html.is_file()
    assert list(paths.export.glob("*.safetensors"))
    steps = {record.step: record.metrics for record in read_metrics(paths.metrics)}
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for metrics in steps.values():
        # Every step samples with the weights of the step before.
        assert metrics["mismatch/abs_mean"] < 0.05
        assert ("memory/offloaded_gib/actor" in metrics) == ("placement.offload=true" in settings)
