"""Which run directories can be continued, and with which changes."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import parse
from megarl.config import Config, from_dict
from megarl.config.lora import LoraConfig
from megarl.config.plugins import use_plugins
from megarl.config.schema import ActorConfig, LayoutConfig, role_settings
from megarl.errors import ConfigError, DataError
from megarl.record.checkpoints import RunState, checkpoint_dir, mark_complete
from megarl.record.inputs import RunInputs
from megarl.record.recorder import RunRecorder, write_settings
from megarl.run.resume import (
    CONTINUABLE,
    check_resumed,
    find_checkpoint,
    require_plugins_of_run,
    resume_notes,
    with_models_of_run,
)
from megarl.types import AlgoState
from tests.helpers.hostile_pickles import ATTACKS, write_role


def config(root: Path, **sections: Any) -> Config:
    run = {"dir": str(root), "name": "a", **sections.pop("run", {})}
    return from_dict(Config, {"run": run, "data": {"train": ["a.parquet"]}, **sections})


def save(config: Config, step: int = 4, command: str = "train", *, portable: bool = True) -> Path:
    """A complete checkpoint in the run directory of a configuration."""
    path = checkpoint_dir(Path(config.run.dir, config.run.name, "checkpoints"), step)
    path.mkdir(parents=True)
    state = RunState(
        command="train" if command == "train" else "sft",
        step=step,
        num_optimizer_steps=step,
        sampler={},
        algo=AlgoState(),
        source={},
        score=None,
        config=config,
        portable=portable,
    )
    (path / "state.json").write_text(state.to_json())
    mark_complete(path)
    return path


def message(config: Config) -> str:
    """The first check, which reads no files, refuses the same, unless only names of files have changed."""
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(config, "train")
    told = str(caught.value)
    assert "\n" not in told
    if re.search(r"settings: (data.train|reference.model_path): ", told):
        assert list(check_resumed(config, "train")) == []
    else:
        with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
            list(check_resumed(config, "train"))
    return told


def test_the_same_configuration_continues(tmp_path: Path) -> None:
    path = save(config(tmp_path))
    checkpoint = find_checkpoint(config(tmp_path), "train")
    assert checkpoint is not None
    assert checkpoint.path == path
    assert resume_notes(checkpoint, config(tmp_path), RunInputs({})) == [f"continuing after step 4 from {path}"]


def test_a_run_that_has_done_all_its_steps_says_so(tmp_path: Path) -> None:
    done = replace(config(tmp_path), trainer=replace(config(tmp_path).trainer, total_steps=4))
    save(done)
    checkpoint = find_checkpoint(done, "train")
    assert checkpoint is not None
    _, note = resume_notes(checkpoint, done, RunInputs({}))
    assert note == "all 4 steps are done: only the export is written; raise trainer.total_steps to go on"


def test_a_layout_that_cannot_read_the_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def run(**layout: int) -> Config:
        return config(tmp_path, actor={"layout": layout})

    path = save(run(tp=2, dp=2), portable=False)
    # Megatron divides the optimizer's state anew over other numbers of replicas, but nothing else.
    assert find_checkpoint(run(tp=2, dp=4), "train") is not None
    assert message(run(tp=1, pp=2, dp=2)) == (
        f"actor.layout.tp: 2 → 1; actor.layout.pp: 1 → 2: {path} is not portable, so only dp may change; continue with "
        "the old layout and checkpoint.portable=true until the next checkpoint, and change the layout then"
    )
    # Without the distributed optimizer there is nothing to gather.
    plain = config(tmp_path, run={"name": "plain"}, actor={"layout": {"tp": 2}, "optimizer": {"distributed": False}})
    save(plain, portable=False)
    assert find_checkpoint(replace(plain, actor=replace(plain.actor, layout=LayoutConfig())), "train") is not None


def test_what_overlaps_may_change_with_the_machine(tmp_path: Path) -> None:
    """Ranks hold the same shards, so a checkpoint that is not portable continues, and so do random numbers."""

    def run(overlaps: bool | None) -> Config:
        layout = {"pp": 4, "virtual_pp": 2, "overlap_p2p": overlaps}
        return config(tmp_path, actor={"layout": layout, "optimizer": {"overlap_param_gather": overlaps}})

    save(run(False), portable=False)
    checkpoint = find_checkpoint(run(None), "train")
    assert checkpoint is not None
    assert checkpoint.same_layout(role_settings(run(None))) == checkpoint.same_layout(role_settings(run(False)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_checkpoint_that_could_run_code_is_refused(tmp_path: Path, attack: str) -> None:
    path, mark = save(config(tmp_path)), tmp_path / "mark"
    write_role(path / "actor")
    file = ATTACKS[attack](path / "actor", mark)
    with pytest.raises(DataError) as error:
        find_checkpoint(config(tmp_path), "train")
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"rank": 16}, "actor.lora.rank: 8 → 16"),
        ({"rank": 8, "alpha": 16.0}, "actor.lora.alpha: 32.0 → 16.0"),
        ({"rank": 8, "targets": ["attention"]}, "actor.lora.targets: ('attention', 'mlp') → ('attention',)"),
        (None, "actor.lora: LoraConfig("),
    ],
)
def test_adapters_go_on_as_they_are(tmp_path: Path, lora: dict[str, Any] | None, told: str) -> None:
    def run(lora: dict[str, Any] | None) -> Config:
        settings = None if lora is None else {"targets": ["attention", "mlp"], **lora}
        return config(tmp_path, actor={"lora": settings}, model={"dtype": "float32"})

    save(run({"rank": 8}))
    assert told in message(run(lora))
    assert find_checkpoint(run({"rank": 8, "export": "both", "sync": "merged"}), "train") is not None


def test_the_models_of_a_run_are_those_that_it_has_recorded(tmp_path: Path) -> None:
    cached, commit = "/hub/models--org--tiny/snapshots", "c0ffee" * 6 + "c0de"
    asked = config(tmp_path, model={"path": "org/tiny"}, critic={"model_path": "org/other"})
    assert with_models_of_run(asked) == asked
    write_settings(tmp_path / "a", config(tmp_path, model={"path": f"{cached}/{commit}"}))
    assert json.loads((tmp_path / "a" / "versions.json").read_text())["model.path: org/tiny"] == commit
    again = with_models_of_run(asked)
    assert (again.model.path, again.critic.model_path) == (f"org/tiny@{commit}", "org/other")
    assert with_models_of_run(config(tmp_path, model={"path": "org/tiny@v1"})).model.path == "org/tiny@v1"


@pytest.mark.parametrize(
    ("there", "meant"),
    [("rnus/a", True), ("run/a", True), ("runs/aa", False), ("runs/seed-12", False), ("other/a", False)],
)
def test_nothing_to_continue(tmp_path: Path, there: str, meant: bool) -> None:
    """A run whose name is another only by a slip may be meant; one of another number, or of a short name, not."""
    (tmp_path / there / "checkpoints/step_000001").mkdir(parents=True)
    asked = config(tmp_path / "runs", run={"name": "seed-11"} if "seed" in there else {})
    assert find_checkpoint(asked, "train") is None
    root = tmp_path / "runs" / asked.run.name
    first, *warned = check_resumed(asked, "train")
    assert first == f"no checkpoint in {root}/checkpoints: the run starts from its first step"
    assert (
        warned
        == [f"warning: --resume: {root} holds no run, but {tmp_path / there} does; correct run.dir or run.name"] * meant
    )


@pytest.mark.parametrize("change", [{"trainer": {"total_epochs": 3}}, {"model": {"path": "org/tiny"}}])
def test_what_is_known_with_models_and_rows_is_compared_then(tmp_path: Path, change: dict[str, Any]) -> None:
    save(config(tmp_path, model={"path": str(tmp_path)}, trainer={"total_steps": 40}))
    assert list(check_resumed(config(tmp_path, **({"model": {"path": str(tmp_path)}} | change)), "train")) == []


def test_a_finished_run_without_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a" / "export").mkdir(parents=True)
    assert message(config(tmp_path)) == (
        f"{tmp_path}/a holds a finished run without a checkpoint, which --resume would replace; "
        "choose another run.name, or pass --overwrite"
    )


def test_a_supervised_run_may_be_validated_at_other_steps(tmp_path: Path) -> None:
    save(config(tmp_path), command="sft")
    assert find_checkpoint(config(tmp_path, sft={"val_every_steps": 7}), "sft") is not None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": {"train": ["b.parquet"]}}, "data.train: ('a.parquet',) → ('b.parquet',)"),
        ({"algo": {"kl": {"coef": 0.5}}}, "algo.kl.coef: 0.001 → 0.5"),
        ({"run": {"seed": 1}}, "run.seed: 0 → 1"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature: 1.0 → 0.5"),
        ({"trainer": {"prompts_per_step": 64}}, "trainer.prompts_per_step: 128 → 64"),
        ({"actor": {"optimizer": {"weight_decay": 0.5}}}, "actor.optimizer.weight_decay: 0.01 → 0.5"),
    ],
)
def test_a_change_of_what_is_optimised_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = save(config(tmp_path))
    assert message(config(tmp_path, **change)) == (
        f"{path}: cannot be continued with other settings: {told}; restore them, or choose another run.name"
    )


def test_all_refused_changes_are_named(tmp_path: Path) -> None:
    save(config(tmp_path))
    changed = message(config(tmp_path, run={"seed": 1}, algo={"name": "b"}, logging={"num_rollouts": 1}))
    assert "run.seed: 0 → 1; algo.name: grpo → b; restore" in changed
    assert "logging" not in changed


def test_a_change_of_where_and_how_it_computes_is_noted(tmp_path: Path) -> None:
    path = save(config(tmp_path))
    changed = config(tmp_path, actor={"layout": {"tp": 2}, "optimizer": {"lr": 0.5}}, trainer={"total_steps": 200})
    checkpoint = find_checkpoint(changed, "train")
    assert checkpoint is not None
    assert resume_notes(checkpoint, changed, RunInputs({})) == [
        f"continuing after step 4 from {path}",
        "changed since the checkpoint: actor.layout.tp: 1 → 2",
        "changed since the checkpoint: actor.optimizer.lr: 1e-06 → 0.5",
        "changed since the checkpoint: trainer.total_steps: 100 → 200",
        "changed by that: the learning rate of the next step: 1e-06 → 0.5",
        "another layout: random number generators are seeded anew",
    ]


def test_layouts_and_schedules_of_the_critic_may_change_and_its_objective_may_not(tmp_path: Path) -> None:
    ppo = {"algo": {"advantage": {"estimator": "gae"}}}
    path = save(config(tmp_path, **ppo))
    critic = {"layout": {"pp": 2}, "micro_batch_tokens": 9000, "optimizer": {"lr": 0.5}}
    changed = config(tmp_path, **ppo, critic=critic, reference={"layout": {"dp": 2}})
    checkpoint = find_checkpoint(changed, "train")
    assert checkpoint is not None
    notes = resume_notes(checkpoint, changed, RunInputs({}))
    assert "changed since the checkpoint: critic.optimizer.lr: 1e-05 → 0.5" in notes
    assert any(note.startswith("changed since the checkpoint: critic.layout: None → LayoutConfig(") for note in notes)
    assert notes[-1] == "another layout: random number generators are seeded anew"
    assert message(config(tmp_path, **ppo, critic={"value_clip": None})) == (
        f"{path}: cannot be continued with other settings: critic.value_clip: 0.2 → None; "
        "restore them, or choose another run.name"
    )
    assert "critic.freeze: False → True" in message(config(tmp_path, **ppo, critic={"freeze": True}))
    assert "reference.model_path: None → b" in message(config(tmp_path, **ppo, reference={"model_path": "b"}))


def test_fewer_steps_than_done(tmp_path: Path) -> None:
    path = save(config(tmp_path))
    assert message(config(tmp_path, trainer={"total_steps": 3})) == (
        f"trainer.total_steps: got 3, expected >= 4, the steps that {path} has done"
    )


def test_each_command_continues_its_own_runs(tmp_path: Path) -> None:
    path = save(config(tmp_path), command="sft")
    assert message(config(tmp_path)) == (
        f"{path}: was written by megarl sft, which continues it; choose another run.name for megarl train"
    )


def test_a_run_with_defaults_of_earlier_versions_continues_with_what_is_derived_now(tmp_path: Path) -> None:
    """They were no null, and its checkpoint spells them out."""
    defaults = {
        "sync": {"host_group": "gloo"},
        "cluster": {"object_store_mib": 256},
        "rollout": {"engine": {"gpu_memory_utilization": 0.6}},
        "actor": {"moe": {"grouped_gemm": True, "fuse_permute": True, "fuse_router": True}},
    }
    save(config(tmp_path, **defaults))
    checkpoint = find_checkpoint(config(tmp_path), "train")
    assert checkpoint is not None
    assert "changed since the checkpoint: sync.host_group: gloo → None" in resume_notes(
        checkpoint, config(tmp_path), RunInputs({})
    )
    # What is null stays null, whatever a run derives: it changes nothing when the run goes on elsewhere.
    save(config(tmp_path), step=5)
    checkpoint = find_checkpoint(config(tmp_path), "train")
    assert checkpoint is not None
    assert not [note for note in resume_notes(checkpoint, config(tmp_path), RunInputs({})) if "host_group" in note]


def test_every_continuable_key_exists(tmp_path: Path) -> None:
    for key in CONTINUABLE:
        node: Any = Config(actor=ActorConfig(lora=LoraConfig()))
        for name in key.split("."):
            node = getattr(node, name)


def test_a_run_without_a_critic_continues_although_its_checkpoint_has_settings_of_one(tmp_path: Path) -> None:
    """Earlier run files set critic.optimizer for all algorithms."""
    unread = {"critic": {"optimizer": {"weight_decay": 0.0, "lr": 1e-3}}}
    save(config(tmp_path, **unread))
    checkpoint = find_checkpoint(config(tmp_path), "train")
    assert checkpoint is not None
    assert len(resume_notes(checkpoint, config(tmp_path), RunInputs({}))) == 1
    with_critic = {"algo": {"advantage": {"estimator": "gae"}}}
    save(config(tmp_path, **with_critic, **unread), step=5)
    assert "critic.optimizer.weight_decay: 0.0 → 0.01" in message(config(tmp_path, **with_critic))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], None),
        (["--resume"], "newest"),
        (["--resume=newest-whole"], "newest-whole"),
        # The script of a Slurm job adds --resume to the options of its user.
        (["--resume=newest-whole", "--resume"], "newest-whole"),
        (["--resume", "--resume=newest-whole"], "newest-whole"),
    ],
)
def test_how_to_resume_is_an_option_before_or_after_the_run_file(options: list[str], expected: str | None) -> None:
    for arguments in ([*options, "run.yaml", "run.name=a"], ["run.yaml", "run.name=a", *options]):
        parsed = parse(["sft", *arguments])
        assert (parsed.resume, parsed.config, parsed.overrides) == (expected, Path("run.yaml"), ["run.name=a"])


@pytest.mark.parametrize("options", [["--resume=oldest"], ["--resume", "--overwrite"]])
def test_no_other_way_to_resume(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["train", "run.yaml", *options])


# --- what the run directory keeps


LOSS = """
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossTerms


@POLICY_LOSSES.register("own")
def own(x, cfg):
    return PolicyLossTerms(loss=-x.advantages * x.log_ratio, diagnostics={})
"""


def test_a_run_continues_with_the_plugins_that_it_began_with(tmp_path: Path) -> None:
    file = tmp_path / "my_losses.py"
    file.write_text(LOSS)
    with_plugin = config(tmp_path, algo={"plugins": [str(file)], "policy_loss": {"name": "own"}})
    root, algo = tmp_path / "a", with_plugin.algo
    try:
        use_plugins(algo.plugins)
        RunRecorder(with_plugin)
        record = json.loads((root / "plugins.json").read_text())
        assert record == {"my_losses.py": {"path": str(file), "sha256": hashlib.sha256(LOSS.encode()).hexdigest()}}
        copy = root / "plugins" / "my_losses.py"
        assert copy.read_text() == LOSS

        file.write_text(LOSS + "# another\n")
        # Without a checkpoint, it begins anew.
        require_plugins_of_run(with_plugin)
        save(with_plugin)
        with pytest.raises(ConfigError) as caught:
            require_plugins_of_run(with_plugin)
        now, before = (hashlib.sha256(text.encode()).hexdigest() for text in (file.read_text(), LOSS))
        assert str(caught.value) == (
            f"{file}: has changed since {root} was begun: got the SHA-256 {now}, expected {before}; restore it from "
            f"{copy}, or start a new run with another run.name"
        )
        file.write_bytes(copy.read_bytes())
        require_plugins_of_run(with_plugin)
        assert find_checkpoint(with_plugin, "train") is not None
    finally:
        use_plugins([])
    # The run's own loss is not known then, which must not hide what has changed.
    without = message(config(tmp_path))
    assert f"algo.plugins: ('{file}',) → ()" in without
    assert "algo.policy_loss.name: own → ppo_clip" in without


def test_plugins_that_lie_in_the_run_are_not_overwritten(tmp_path: Path) -> None:
    kept = tmp_path / "a" / "plugins" / "my_losses.py"
    kept.parent.mkdir(parents=True)
    kept.write_text(LOSS)
    (tmp_path / "a" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"my_losses\.py lies in .*, which --overwrite removes"):
        RunRecorder(config(tmp_path, algo={"plugins": [str(kept)]}), overwrite=True)
    assert kept.exists()


def test_a_longer_run_is_told_the_jump_of_its_learning_rate(tmp_path: Path) -> None:
    """After 99 of 100 steps a cosine is near its end, after 99 of 200 near its middle: lr · (1 − cos(π · rest)) / 2."""
    optimizer = {"lr": 1.0, "schedule": "cosine", "decay_frac": 1.0, "min_lr_frac": 0.0, "warmup_steps": 0}

    def lasting(steps: int, **more: Any) -> Config:
        return config(tmp_path, trainer={"total_steps": steps}, actor={"optimizer": {**optimizer, **more}})

    save(lasting(100), step=99)
    found = find_checkpoint(lasting(200), "train")
    assert found is not None
    # 1 of 100 steps is left: 0.000247; 101 of 200: 0.508.
    (note,) = [note for note in resume_notes(found, lasting(200), RunInputs({})) if "learning rate" in note]
    assert note.endswith(": 0.000247 → 0.508")
    assert not any("learning rate" in note for note in resume_notes(found, lasting(100), RunInputs({})))
    (note,) = [n for n in resume_notes(found, lasting(100, schedule="constant"), RunInputs({})) if "learning rate" in n]
    assert note.endswith(": 0.000247 → 1")
