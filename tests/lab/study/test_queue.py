"""A study file read strictly, all runs checked first, finished runs skipped, failures survived; no process starts."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from megarl.cli import main
from megarl.config import Config, load_config
from megarl.config.derived import Derived
from megarl.errors import ConfigError, DataError, NonFiniteError, RunError, RunStopped
from megarl.record.checkpoints import Checkpoint, RunState, checkpoint_dir, mark_complete
from megarl.record.metrics import RunPaths
from megarl.record.recorder import RunRecorder
from megarl.train.inputs import TrainInputs
from megarl.types import AlgoState
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles, generate
from megarl_lab.study.queue import (
    PlannedRun,
    Study,
    StudyPlan,
    is_finished,
    load_study,
    plan_study,
    plan_text,
    run_config,
    run_study,
)
from tests.helpers.checkpoints import make_checkpoint

REPOSITORY = Path(__file__).parents[3]
BASE = REPOSITORY / "configs" / "run" / "sums-rl.yaml"


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    sizes = GenerateConfig(seed=0, num_sft=4, num_train=32, num_val=4)
    return generate(TASKS.get("sums"), tmp_path_factory.mktemp("sums"), sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def study_of(tmp_path: Path, sums: TaskFiles, model: Path) -> Callable[..., Study]:
    """A study file with these runs, read back."""

    def make(*runs: dict[str, Any], **changes: Any) -> Study:
        overrides = [f"model.path={model}", f"data.train=[{sums.train}]", f"data.val=[{sums.val}]"]
        tree = {"base": str(BASE), "dir": str(tmp_path / "study"), "overrides": overrides, "runs": list(runs)}
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(tree | changes))
        return load_study(path)

    return make


def test_one_cluster_suits_all_runs() -> None:
    """The least memory for engines that the trainer of one of them leaves, the largest store, and the link of all."""

    def planned(place: int, share: float, mib: int) -> PlannedRun:
        values = {
            "rollout.engine.gpu_memory_utilization": share,
            "sync.host_group": "device",
            "cluster.object_store_mib": mib,
        }
        derived = tuple(Derived(key=key, value=value, reason="") for key, value in values.items())
        return PlannedRun(place=place, config=Config(), roles=(), architecture={}, derived=derived)

    plan = StudyPlan(num_runs=2, finished={}, waiting=(planned(1, 0.45, 900), planned(2, 0.3, 256)))
    assert [each.value for each in plan.derived] == [0.3, "device", 900]


class Machine:
    """Stands in for clusters and trainers: remembers what was asked, fails and stops where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clusters: list[list[str]] = []
        self.closed: list[bool] = []
        self.errors: dict[str, Exception] = {}
        self.reports: list[str] = []
        monkeypatch.setattr("megarl.cluster.cluster.Cluster", self.open_cluster)
        monkeypatch.setattr("megarl.train.wiring.build_trainer", self.open_trainer)
        monkeypatch.setattr("megarl_lab.study.queue.write_report", lambda root: self.reports.append(root.name))

    def open_cluster(self, *_: object, **__: object) -> "Machine":
        self.clusters.append([])
        return self

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close(failed=error[0] is not None)

    def close(self, *, failed: bool = False) -> None:
        if len(self.closed) < len(self.clusters):
            self.closed.append(failed)

    def open_trainer(self, inputs: TrainInputs, _: object, recorder: RunRecorder) -> "FakeTrainer":
        self.clusters[-1].append(inputs.config.run.name)
        return FakeTrainer(inputs, recorder, self.errors.get(inputs.config.run.name))


class FakeTrainer:
    """Leaves the metrics of the first and the last step, and an export, as the real one does."""

    begun: ClassVar[list[int | None]] = []

    def __init__(self, inputs: TrainInputs, recorder: RunRecorder, error: Exception | None) -> None:
        self.total, self.recorder, self.error = inputs.config.trainer.total_steps, recorder, error

    def fit(self, checkpoint: Checkpoint | None) -> None:
        self.begun.append(checkpoint and checkpoint.state.step)
        with self.recorder.metrics() as log:
            score = {"val/test_score/megarl/sums": 0.25, "val/num_prompts/megarl/sums": 100.0}
            log.log(0, score)
            if self.error:
                raise self.error
            log.log(self.total, {"critic/score/mean": 0.5} | score | {"val/test_score/megarl/sums": 0.75})
        self.recorder.paths.export.mkdir()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_run_config(study_of: Callable[..., Study], tmp_path: Path, model: Path) -> None:
    """The study's overrides above the base, those of the run above them."""
    runs = ({"algo": "grpo", "seed": 3, "overrides": ["trainer.total_steps=7"]}, {"algo": "gspo"})
    study = study_of(*runs, overrides=["trainer.total_steps=25", "actor.optimizer.lr=2e-5"])
    first, second = (run_config(study, run) for run in study.runs)
    assert (first.run.name, first.run.seed, first.run.dir) == ("grpo-seed3", 3, str(tmp_path / "study"))
    assert (first.trainer.total_steps, first.actor.optimizer.lr, first.algo.name) == (7, 2e-5, "grpo")
    assert (second.run.name, second.run.seed, second.algo.name) == ("gspo-seed0", 0, "gspo")
    assert second.trainer.total_steps == 25


def test_a_name_tells_variants_apart(study_of: Callable[..., Study]) -> None:
    study = study_of({"algo": "grpo"}, {"algo": "grpo", "name": "hot", "overrides": ["rollout.temperature=1.2"]})
    assert [run.full_name for run in study.runs] == ["grpo-seed0", "hot-seed0"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": []}, r"study.yaml: unknown key 'run'; did you mean 'runs'\?"),
        ({"runs": []}, r"study.yaml: runs: is empty, expected a list such as"),
        ({"runs": [{"algo": "grpo", "sed": 1}]}, r"study.yaml: unknown key 'runs\[0\].sed'; did you mean"),
        ({"runs": 3}, r"study.yaml: runs: got 3 \(int\), expected a list of \{algo, seed, name, overrides\}"),
        ({"runs": [{"seed": 1}]}, r"study.yaml: runs\[0\].algo: is missing; runs\[0\] has: algo, seed"),
        ({"runs": [{"algo": "grpo", "seed": "x"}]}, r"study.yaml: runs\[0\].seed: got 'x' \(str\), expected int"),
        ({"runs": [{"algo": "grpo"}, {"algo": "grpo"}]}, r"study.yaml: runs: grpo-seed0 is there twice; give one"),
    ],
)
def test_mistakes_in_the_file(study_of: Callable[..., Study], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_of({"algo": "grpo"}, **changes)


def test_the_file_must_name_its_base(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("runs: [{algo: grpo}]\ndir: x\n")
    with pytest.raises(ConfigError, match=r"study.yaml: base: is missing; there are: base, dir, runs, overrides"):
        load_study(tmp_path / "study.yaml")


@pytest.mark.parametrize("key", ["run.dir", "run.name", "run.seed", "use.algo"])
def test_overrides_may_not_set_what_the_study_decides(study_of: Callable[..., Study], key: str) -> None:
    study = study_of({"algo": "grpo", "overrides": [f"{key}=1"]})
    with pytest.raises(ConfigError, match=f"grpo-seed0: overrides set {key}, which the study decides"):
        run_config(study, study.runs[0])


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["trainer.total_step=3"], ConfigError, "gspo-seed1: unknown key 'trainer.total_step'"),
        (["rollout.top_p=0.9"], ConfigError, "gspo-seed1: rollout.top_p: got 0.9"),
        (["data.max_prompt_tokens=4"], DataError, "gspo-seed1: .*train.parquet row 0"),
        (["rollout.engine.max_num_seqs=3"], ConfigError, "gspo-seed1: this cluster .* another rollout.engine;"),
        (["actor.layout={tp: 2, dp: 1}"], ConfigError, "another actor.layout;"),
    ],
)
def test_every_run_is_checked_before_anything_starts(
    study_of: Callable[..., Study], machine: Machine, overrides: list[str], error: type[Exception], message: str
) -> None:
    study = study_of({"algo": "grpo"}, {"algo": "gspo", "seed": 1, "overrides": overrides})
    with pytest.raises(error, match=message):
        run_study(study)
    assert machine.clusters == []
    assert not Path(study.dir).exists()


def test_a_model_of_another_shape_is_refused(study_of: Callable[..., Study], machine: Machine, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", tied=True, num_layers=3)
    study = study_of({"algo": "grpo"}, {"algo": "gspo", "overrides": [f"model.path={other}"]})
    with pytest.raises(ConfigError, match=r"gspo-seed0: the model in .*other is not of the shape of that in"):
        run_study(study)
    assert machine.clusters == []


def test_the_cluster_has_room_for_the_longest_context(study_of: Callable[..., Study]) -> None:
    study = study_of({"algo": "grpo"}, {"algo": "gspo", "overrides": ["rollout.max_response_tokens=96"]})
    plan = plan_study(study)
    assert plan.cluster_config.run.name == "gspo-seed0"
    assert [role.role for role in plan.roles] == ["actor"]


def test_all_runs_share_one_cluster(
    study_of: Callable[..., Study], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of({"algo": "grpo"}, {"algo": "grpo", "seed": 1}, {"algo": "gspo"})
    assert run_study(study) == []
    assert machine.clusters == [["grpo-seed0", "grpo-seed1", "gspo-seed0"]]
    assert machine.closed == [False]
    lines = capsys.readouterr().out.splitlines()
    # √(0.25 · 0.75 / 100) = 0.043
    assert lines[0].startswith("[1/3] grpo-seed0: validation 0.250 ± 0.043 → 0.750 ± 0.043 in ")
    assert lines[-1].endswith(": 3 done, 0 skipped, 0 failed")
    assert machine.reports == machine.clusters[0]


def test_finished_runs_are_skipped_and_those_without_a_checkpoint_start_anew(
    study_of: Callable[..., Study], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of({"algo": "grpo"}, {"algo": "gspo"})
    run_study(study)
    gspo = Path(study.dir) / "gspo-seed0"
    shutil.rmtree(gspo / "export")
    (gspo / "left-over").touch()
    assert plan_text(plan_study(study)) == "[1/2] grpo-seed0: finished\n[2/2] gspo-seed0: to do"
    assert run_study(study) == []
    assert machine.clusters == [["grpo-seed0", "gspo-seed0"], ["gspo-seed0"]]
    assert "[1/2] grpo-seed0: finished before, skipped" in capsys.readouterr().out
    assert not (gspo / "left-over").exists()
    run_study(study)
    assert len(machine.clusters) == 2


def test_an_unfinished_run_goes_on_after_its_last_checkpoint(study_of: Callable[..., Study], machine: Machine) -> None:
    study = study_of({"algo": "grpo"})
    config = run_config(study, study.runs[0])
    path = checkpoint_dir(RunPaths.of(config.run).checkpoints, 7)
    path.mkdir(parents=True)
    state = RunState(
        command="train",
        step=7,
        num_optimizer_steps=7,
        sampler={},
        algo=AlgoState(),
        source={},
        score=None,
        config=config,
        portable=True,
    )
    (path / "state.json").write_text(state.to_json())
    mark_complete(path)
    FakeTrainer.begun.clear()
    assert run_study(study) == []
    assert FakeTrainer.begun == [7]
    assert is_finished(config)
    shutil.rmtree(RunPaths.of(config.run).root / "export")
    with pytest.raises(ConfigError, match=r"began with other settings: actor\.optimizer\.lr"):
        plan_study(study_of({"algo": "grpo", "overrides": ["actor.optimizer.lr=1e-3"]}))


def test_a_run_whose_last_step_is_missing_is_not_finished(study_of: Callable[..., Study], machine: Machine) -> None:
    study = study_of({"algo": "grpo"})
    run_study(study)
    metrics = Path(study.dir) / "grpo-seed0" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert not is_finished(run_config(study, study.runs[0]))


def test_a_run_that_ended_as_its_policy_collapsed_is_finished(study_of: Callable[..., Study], machine: Machine) -> None:
    study = study_of({"algo": "grpo", "overrides": ["validation.stop_after_zeros=2"]})
    run_study(study)
    metrics = Path(study.dir) / "grpo-seed0" / "metrics.jsonl"
    lines = [
        {"step": step, "time_s": 0.0, "metrics": {"val/test_score/sums": score}}
        for step, score in ((0, 0.3), (10, 0.0), (20, 0.0))
    ]
    config = run_config(study, study.runs[0])
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert not is_finished(config)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert is_finished(config)


def test_a_run_finished_with_other_settings_is_an_error(study_of: Callable[..., Study], machine: Machine) -> None:
    study = study_of({"algo": "grpo"})
    run_study(study)
    changed = study_of({"algo": "grpo", "overrides": ["trainer.total_steps=41"]})
    with pytest.raises(ConfigError, match=r"began with other settings: trainer\.total_steps: 40 → 41; restore"):
        plan_study(changed)


def test_a_moved_study_is_still_finished(study_of: Callable[..., Study], machine: Machine, tmp_path: Path) -> None:
    run_study(study_of({"algo": "grpo"}))
    (tmp_path / "study").rename(tmp_path / "moved")
    assert plan_study(study_of({"algo": "grpo"}, dir=str(tmp_path / "moved"))).waiting == ()


@pytest.mark.parametrize("error", [NonFiniteError("step 1: loss is NaN"), KeyError("surprise")])
def test_the_others_go_on_after_a_failure_with_new_processes(
    study_of: Callable[..., Study], machine: Machine, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.errors["gspo-seed0"] = error
    study = study_of({"algo": "grpo"}, {"algo": "gspo"}, {"algo": "grpo", "seed": 1})
    assert run_study(study) == ["gspo-seed0"]
    assert machine.clusters == [["grpo-seed0", "gspo-seed0"], ["grpo-seed1"]]
    assert machine.closed == [True, False]
    output = capsys.readouterr()
    (line,) = (line for line in output.out.splitlines() if "FAILED" in line)
    assert line.startswith("[2/3] gspo-seed0: FAILED after ")
    assert line.endswith(f"{type(error).__name__}: {error}")
    assert ("Traceback" in output.err) == isinstance(error, KeyError)
    assert output.out.splitlines()[-1].endswith(": 2 done, 0 skipped, 1 failed: gspo-seed0")


def test_a_stop_ends_the_study(study_of: Callable[..., Study], machine: Machine) -> None:
    machine.errors["grpo-seed0"] = RunStopped("stopped by SIGTERM after step 3")
    study = study_of({"algo": "grpo"}, {"algo": "gspo"})
    with pytest.raises(RunStopped, match="study: grpo-seed0 was stopped; the same command goes on"):
        run_study(study)
    assert machine.clusters == [["grpo-seed0"]]


def test_a_stop_in_the_last_step_of_a_run_ends_the_study_after_it(
    study_of: Callable[..., Study], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl_lab.study.queue.last_stop_signal", lambda: signal.SIGTERM)
    study = study_of({"algo": "grpo"}, {"algo": "gspo"})
    with pytest.raises(RunStopped, match="study: stopped by SIGTERM after grpo-seed0; the same command goes on"):
        run_study(study)
    assert plan_text(plan_study(study)).splitlines()[0] == "[1/2] grpo-seed0: finished"


def test_a_cluster_without_room_ends_the_study(study_of: Callable[..., Study], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("placement: no room")

    monkeypatch.setattr("megarl.cluster.cluster.Cluster", refuse)
    with pytest.raises(RunError, match="placement: no room"):
        run_study(study_of({"algo": "grpo"}))


@pytest.fixture
def run_queue() -> Iterator[Callable[..., int]]:
    """`megarl study`; returns the exit code. Signal handlers are the test session's again afterwards."""
    handlers = {
        signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }

    def run(*arguments: str) -> int:
        try:
            main(["study", *arguments])
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    yield run
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def test_tool(
    study_of: Callable[..., Study],
    machine: Machine,
    run_queue: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0 if all is done, 1 if a run failed, 85 if a signal stopped it, 2 if the file is wrong."""
    path = str(tmp_path / "study.yaml")
    study_of({"algo": "grpo"}, {"algo": "gspo"})
    assert run_queue(path, "--check") == 0
    assert capsys.readouterr().out == "[1/2] grpo-seed0: to do\n[2/2] gspo-seed0: to do\n"
    assert machine.clusters == []
    machine.errors["grpo-seed0"] = RunStopped("stopped by SIGTERM")
    assert run_queue(path) == 85
    machine.errors["grpo-seed0"] = NonFiniteError("step 1: loss is NaN")
    assert run_queue(path) == 1
    machine.errors.clear()
    assert run_queue(path) == 0
    study_of({"algo": "grop"})
    assert run_queue(path) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: grop-seed0: use.algo: no file ")


def test_the_study_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """27 runs: every algorithm with every seed."""
    monkeypatch.chdir(REPOSITORY)
    study = load_study(Path("configs/study/sums.yaml"))
    configs = [run_config(study, run) for run in study.runs]
    algorithms = {run.algo for run in study.runs}
    assert len(configs) == 27
    assert {(run.algo, run.seed) for run in study.runs} == {(a, s) for a in algorithms for s in range(3)}
    assert len({config.algo.name for config in configs}) == len(algorithms) == 9
    base = load_config(Path(study.base))
    assert {config.model.path for config in configs} == {base.model.path}
    # Equal budgets.
    budgets = {(c.trainer.total_steps, c.trainer.prompts_per_step, c.rollout.num_samples) for c in configs}
    assert len(budgets) == 1


OFF_POLICY = "configs/study/offpolicy-float8.yaml"


def test_the_study_of_off_policy_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen methods at staleness 8, and no method at 0 and 8, which come first; two seeds of each."""
    monkeypatch.chdir(REPOSITORY)
    study = load_study(Path(OFF_POLICY))
    configs = [run_config(study, run) for run in study.runs]
    first = [run.full_name for run in study.runs[:4]]
    assert first == ["none-0-seed0", "none-8-seed0", "none-0-seed1", "none-8-seed1"]
    assert {run.seed for run in study.runs} == {0, 1}
    assert len({run.name for run in study.runs}) == 17
    assert len(configs) == 34
    assert {config.rollout.schedule.staleness for config in configs[4:]} == {8}


@pytest.mark.parametrize(("name", "num_runs", "steps"), [("float8-long", 24, 2000), ("bfloat16", 12, 1500)])
def test_longer_studies_of_off_policy_methods(
    monkeypatch: pytest.MonkeyPatch, name: str, num_runs: int, steps: int
) -> None:
    """Three seeds one after the other, each with both controls first; all else is as in the first study."""
    monkeypatch.chdir(REPOSITORY)
    study, first = load_study(Path(f"configs/study/offpolicy-{name}.yaml")), load_study(Path(OFF_POLICY))
    assert len(study.runs) == num_runs
    assert [run.seed for run in study.runs] == sorted(run.seed for run in study.runs)
    assert {run.full_name for run in study.runs} >= {f"none-{lag}-seed{i}" for lag in (0, 8) for i in range(3)}
    settings = {(run.name, run.overrides) for run in first.runs} | {("cpo-8", study.runs[num_runs // 3 - 1].overrides)}
    assert {(run.name, run.overrides) for run in study.runs} <= settings
    configs = [run_config(study, run) for run in study.runs[: num_runs // 3]]
    assert {config.trainer.total_steps for config in configs} == {steps}
