"""`megarl convert-config`: run files from scripts with the names and values of published ones, and their dry runs."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megarl.algos.build import build_algorithm
from megarl.cli import main
from megarl.config import Config, from_dict, load_config
from megarl.errors import ConfigError
from megarl.migrate.aliases import ALIASES, DEFAULTS
from megarl.migrate.convert_config import Converted, PeerOptions, convert, read_peer_file, to_run_file, translated
from megarl.migrate.peer_scripts import option_name
from tests.unit.migrate.test_aliases import keys_of

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((Path(__file__).parent / "peer_scripts").iterdir())
# Of each script, settings by hand: what a setting here must be for the same run.
EXPECTED: dict[str, dict[str, Any]] = {
    "grpo_verl.sh": {
        "algo.advantage.estimator": "grpo",
        "algo.kl.where": "loss",
        "algo.kl.coef": 0.001,
        "algo.kl.estimator": "low_var_kl",
        "data.train": [f"{Path.home()}/data/gsm8k/train.parquet"],
        "data.on_long_prompt": "drop",
        # 40 rows of 512 + 1024 tokens.
        "actor.micro_batch_tokens": 61440,
        "actor.optimizer.betas": [0.9, 0.999],
        "actor.recompute": "full",
        "rollout.num_samples": 5,
        # 8 devices, 2 to an engine.
        "actor.layout.dp": 8,
        "rollout.engine.num_engines": 4,
        "logging.wandb_project": "verl_grpo_example_gsm8k",
        "checkpoint.every_steps": 20,
        "trainer.total_epochs": 15,
    },
    "dapo_verl.sh": {
        "algo.policy_loss.clip_low": 0.2,
        "algo.policy_loss.clip_high": 0.28,
        "algo.policy_loss.dual_clip": 10.0,
        "algo.filter.mean_score": [0.0, 1.0],
        "algo.filter.by": "correct",
        "algo.filter.max_refills": 9,
        "algo.reward.overlong_buffer_tokens": 4096,
        "algo.aggregation": "token-mean",
        "data.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480,
        # 16 nodes of 8 devices, of which 8 share a row; each of the 8 holds 2048 + 20480 tokens.
        "actor.layout.cp": 8,
        "actor.layout.dp": 16,
        "actor.micro_batch_tokens": 8 * 22528,
        # 10 training steps of 512 / 32 optimizer steps.
        "actor.optimizer.warmup_steps": 160,
        "model.path": "/data/verl/models/Qwen2.5-32B",
        "placement.offload": True,
        "validation.top_p": 0.7,
        "validation.greedy": False,
    },
    "gspo_verl.sh": {
        "algo.policy_loss.name": "gspo",
        "algo.policy_loss.clip_low": 0.0003,
        "algo.policy_loss.clip_high": 0.0004,
        "algo.policy_loss.dual_clip": None,
        "algo.aggregation": "seq-mean-token-mean",
        "data.train": ["/data/gsm8k/train.parquet", "/data/math/train.parquet"],
        "trainer.total_steps": 500,
        # 0.05 × 500 training steps of 512 / 128 optimizer steps.
        "actor.optimizer.warmup_steps": 100,
    },
    "rloo_verl.sh": {
        "algo.advantage.estimator": "rloo",
        "algo.kl.where": "reward",
        "algo.kl.coef": 0.001,
        "algo.kl.estimator": "kl",
        "checkpoint.every_steps": 0,
        "logging.tensorboard": True,
    },
    "reinforce_baseline_verl.sh": {
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.where": "loss",
        "algo.kl.estimator": "mse",
        "actor.optimizer.lr": 3e-6,
    },
    "ppo_verl_megatron.sh": {
        "algo.advantage.estimator": "gae",
        "algo.advantage.lam": 0.95,
        "actor.layout.tp": 2,
        # verl's Megatron shards activations unless told not to.
        "actor.layout.sequence_parallel": True,
        "critic.layout.sequence_parallel": True,
        "actor.layout.pp": 2,
        "actor.layout.dp": 4,
        # The critic's own layout on the same 16 devices.
        "critic.layout.tp": 4,
        "critic.layout.dp": 4,
        "critic.value_clip": 0.5,
        "critic.warmup_steps": 10,
        # 0.05 × 100 training steps of 1024 / 256 optimizer steps.
        "critic.optimizer.warmup_steps": 20,
        "placement.trainer.num_nodes": 2,
    },
    "luffy.sh": {
        "algo.demonstrations.strategy": "random",
        "algo.demonstrations.num_prefixed": 1,
        "algo.demonstrations.min_ratio": 1.0,
        "algo.off_policy.loss": "luffy",
        "algo.off_policy.reshape": "p_div_p_0.1",
        "algo.off_policy.remove_clip": True,
        "algo.advantage.norm_by_std": False,
        "algo.aggregation": "dr_grpo",
        "algo.entropy_coef": 0.001,
        "validation.temperature": 0.6,
        "validation.before_train": False,
    },
    "cpo.sh": {
        "algo.advantage.estimator": "grpo",
        "algo.cpo.method": "negonly_mi3_qwen3",
        "algo.cpo.ratio_clamp": 5.0,
        "algo.cpo.neg_alpha": 0.1,
        "algo.cpo.hint.source": "solution",
        "rollout.num_samples": 8,
    },
    "reinforce_baseline_openrlhf.sh": {
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.correction.name": "icepop",
        "algo.filter.mean_score": [0.0, 1.0],
        "algo.filter.by": "score",
        "algo.kl.where": "loss",
        "algo.kl.coef": 1e-5,
        "algo.kl.estimator": "k2",
        # 1024 rows of 8 samples each.
        "trainer.mini_batch_prompts": 128,
        "rewards.custom.path": "/work/reward_func.py",
        # 4 devices, 2 to a row of 16192 tokens on each.
        "actor.layout.cp": 2,
        "actor.layout.dp": 2,
        "actor.micro_batch_tokens": 32384,
        "actor.optimizer.schedule": "cosine",
        "actor.optimizer.min_lr_frac": 0.1,
        "rollout.engine.num_engines": 2,
    },
    "ppo_openrlhf.sh": {
        "algo.advantage.estimator": "gae",
        "algo.kl.where": "reward",
        "algo.kl.estimator": "k1",
        "rewards.manager": "model",
        "reward_model.model_path": "/models/reward",
        "placement.mode": "split",
        "data.train": [{"path": "/data/a.jsonl", "weight": 0.4}, {"path": "/data/b.jsonl", "weight": 0.6}],
        "critic.optimizer.lr": 9e-6,
        "algo.reward.clip": [-10.0, 10.0],
        # 8 rows of 1024 + 1024 tokens.
        "actor.micro_batch_tokens": 16384,
    },
    "gpg_verl.sh": {
        "algo.name": "gpg",
        "algo.advantage.estimator": "gpg",
        "algo.advantage.norm_by_std": None,
        "algo.policy_loss.name": "reinforce",
        "algo.kl.where": None,
        "rollout.num_samples": 5,
        "trainer.mini_batch_prompts": 256,
    },
    "reinforce_openrlhf.sh": {
        "algo.advantage.estimator": "reinforce_plus_plus",
        "algo.advantage.gamma": 0.99,
        "algo.advantage.norm_by_std": None,
        "algo.kl.where": "reward",
        "algo.kl.coef": 1e-4,
        "rollout.num_samples": 1,
    },
    "group_norm_openrlhf.sh": {
        "algo.advantage.estimator": "group_norm",
        "algo.policy_loss.clip_high": 0.27,
        "algo.kl.where": "loss",
        "trainer.prompts_per_step": 128,
        "trainer.mini_batch_prompts": 32,
        "rollout.max_response_tokens": 4096,
        "placement.mode": "colocated",
    },
    "grpo_verl.yaml": {
        "algo.advantage.norm_by_std": False,
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.schedule": "cosine",
        "actor.optimizer.min_lr_frac": 0.1,
        "rollout.max_response_tokens": 1536,
        "actor.layout.dp": 4,
        "rollout.engine.num_engines": 2,
    },
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_settings_by_hand(script: Path) -> None:
    settings = convert(read_peer_file(script)).settings
    expected = EXPECTED[script.name]
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_run_file_passes_a_dry_run(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A dry run asks for the package of the scripts' tracker, which is no requirement of ours.
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    out = tmp_path / "run.yaml"
    main(["convert-config", str(script), "--out", str(out)])
    assert "options not carried over" in capsys.readouterr().out
    # Sizes are those of Qwen3-8B; a published script's model and data are not on this machine.
    published = ROOT / "configs" / "model" / "hf" / "qwen3-8b"
    model = [f"model.config_path={published}"]
    out.write_text(re.sub(r"_path: /models/.*", f"_path: {published}", out.read_text()))
    steps = [] if "total_steps" in out.read_text() else ["trainer.total_epochs=null", "trainer.total_steps=100"]
    main(["train", str(out), *model, *steps, "--dry-run"])
    assert "nothing was started" in capsys.readouterr().out


def test_what_does_not_exist_is_listed_with_the_reason_and_not_set() -> None:
    converted = convert(
        PeerOptions(
            framework="verl",
            options={
                "algorithm.adv_estimator": "optimal_token_baseline",
                "critic.model.lora_rank": 32,
                "actor_rollout_ref.rollout.multi_turn.enable": False,
                "actor_rollout_ref.rollout.multi_turn.format": "hermes",
                "async_training.staleness_threshold": 0.5,
                "no.such.option": 1,
                "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1,
            },
            unreadable={"model.path=${X}": "unknown"},
        )
    )
    lost = {given.partition("=")[0]: why for given, why in converted.lost.items()}
    assert set(lost) == {
        "algorithm.adv_estimator",
        "critic.model.lora_rank",
        "async_training.staleness_threshold",
        "no.such.option",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "model.path",
    }
    assert "'optimal_token_baseline' has no counterpart" in lost["algorithm.adv_estimator"]
    assert "adapters" in lost["critic.model.lora_rank"]
    assert "asynchronous" in lost["async_training.staleness_threshold"]
    assert "number of optimizer steps" in lost["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"]
    assert "algo.advantage.estimator" not in converted.settings


_VERL = "actor_rollout_ref.model."


@pytest.mark.parametrize(
    ("framework", "options", "expected"),
    [
        # verl's scale is 16 unless it is given, and that of its Megatron's adapters 32.
        ("verl", {f"{_VERL}lora_rank": 8}, {"rank": 8, "alpha": 16.0}),
        ("verl", {f"{_VERL}lora_rank": 8, f"{_VERL}lora_alpha": 4}, {"rank": 8, "alpha": 4.0}),
        (
            "verl",
            {f"{_VERL}lora.rank": 8, f"{_VERL}lora.merge": True, f"{_VERL}lora.type": "lora"},
            {"rank": 8, "alpha": 32.0, "sync": "merged"},
        ),
        ("verl", {f"{_VERL}lora_rank": 0, f"{_VERL}lora_alpha": 4, f"{_VERL}target_modules": "q_proj"}, {}),
        (
            "verl",
            {f"{_VERL}lora_rank": 8, f"{_VERL}target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
            {"rank": 8, "alpha": 16.0, "targets": ["attention"]},
        ),
        ("verl", {f"{_VERL}lora_rank": 8, f"{_VERL}lora_adapter_path": "a"}, {"rank": 8, "alpha": 16.0, "path": "a"}),
        ("OpenRLHF", {"lora_rank": 4, "target_modules": "all-linear"}, {"rank": 4, "alpha": 16.0}),
        ("OpenRLHF", {"lora_rank": 4, "lora_alpha": 8}, {"rank": 4, "alpha": 8.0}),
        (
            "OpenRLHF",
            {"lora_rank": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
            {"rank": 4, "alpha": 16.0, "targets": ["mlp", "experts"]},
        ),
    ],
)
def test_adapters(framework: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    converted = convert(PeerOptions(framework=framework, options=options, unreadable={}))
    found = {key: value for key, value in converted.settings.items() if key.startswith("actor.lora.")}
    assert found == {f"actor.lora.{key}": value for key, value in expected.items()}
    assert not [given for given in converted.lost if "lora" in given or "target_modules" in given]


def test_no_given_option_is_dropped_without_a_word() -> None:
    names = {"train.max_tokens_per_gpu": 16384, "algo.advantage.is_correction_type": "icepop", "made.up": 3}
    plain = {option_name(name, "OpenRLHF"): value for name, value in names.items()}
    lost = convert(PeerOptions(framework="OpenRLHF", options=plain, unreadable={}))
    assert "not set by this value" in lost.needless["train_max_tokens_per_gpu=16384"]
    assert "made.up=3" in lost.lost
    switches = {"train.dynamic_batch_enable": True, "algo.advantage.is_correction_enable": True}
    plain |= {option_name(name, "OpenRLHF"): value for name, value in switches.items()}
    settings = convert(PeerOptions(framework="OpenRLHF", options=plain, unreadable={})).settings
    assert (settings["actor.micro_batch_tokens"], settings["algo.correction.name"]) == (16384, "icepop")


def test_adapters_of_some_modules_alone_are_lost() -> None:
    options = {f"{_VERL}lora_rank": 8, f"{_VERL}target_modules": ["q_proj", "v_proj"], f"{_VERL}lora.type": "dora"}
    lost = convert(PeerOptions(framework="verl", options=options, unreadable={})).lost
    assert (
        "all of k_proj, o_proj, q_proj, v_proj have adapters, or none"
        in lost[f"{_VERL}target_modules=['q_proj', 'v_proj']"]
    )
    assert "'dora' has no counterpart" in lost[f"{_VERL}lora.type=dora"]


@pytest.mark.parametrize(("weights", "style"), [(None, 1.0), ([1.0, 0.25], 0.25)])
def test_components_of_the_reward(weights: list[float] | None, style: float) -> None:
    options = {
        "algorithm.adv_estimator": "gdpo",
        "algorithm.gdpo_reward_keys": ["acc", "style"],
        "algorithm.gdpo_reward_weights": weights,
        "reward.reward_manager.name": "gdpo",
    }
    converted = convert(PeerOptions(framework="verl", options=options, unreadable={}))
    assert not [given for given in converted.lost if given.partition("=")[0] in options]
    assert converted.settings["algo.advantage.estimator"] == "gdpo"
    assert converted.settings["algo.advantage.components"] == {"correct": 1.0, "style": style}


@pytest.mark.parametrize(
    ("in_reward", "in_loss", "expected"),
    [
        (False, False, {}),
        (True, False, {"where": "reward", "coef": 0.1, "estimator": "kl", "controller": "adaptive", "horizon": 500}),
        (False, True, {"where": "loss", "coef": 0.2, "estimator": "k3_straight_through"}),
        (
            True,
            True,
            {"where": "both", "coef": 0.1, "estimator": "kl", "controller": "adaptive", "horizon": 500}
            | {"loss_coef": 0.2, "loss_estimator": "k3_straight_through"},
        ),
    ],
)
def test_kl_in_reward_and_loss(in_reward: bool, in_loss: bool, expected: dict[str, Any]) -> None:
    actor = "actor_rollout_ref.actor"
    options = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": in_reward,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.kl_coef": 0.1,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.horizon": 500,
        f"{actor}.use_kl_loss": in_loss,
        f"{actor}.kl_loss_coef": 0.2,
        f"{actor}.kl_loss_type": "k3+",
    }
    converted = convert(PeerOptions(framework="verl", options=options, unreadable={}))
    got = {key.removeprefix("algo.kl."): value for key, value in converted.settings.items() if key[:8] == "algo.kl."}
    assert got == expected


_ROWS = {"algo.aggregation": "seq-mean-token-mean"}
_CLIP = {"algo.policy_loss.clip_low": 0.1, "algo.policy_loss.clip_high": 0.3}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("vanilla", {"algo.policy_loss.name": "ppo_clip", "algo.policy_loss.dual_clip": 3.0, **_CLIP}),
        ("gpg", {"algo.policy_loss.name": "reinforce"}),
        # These two are means of rows in verl, whatever its loss_agg_mode says.
        ("geo_mean", {"algo.policy_loss.name": "gmpo", **_CLIP, **_ROWS}),
        ("sapo", {"algo.policy_loss.name": "sapo", "algo.policy_loss.tau_neg": 1.2, **_ROWS}),
        (
            "clip_cov",
            {
                "algo.policy_loss.name": "clip_cov",
                "algo.policy_loss.cov_share": 3e-4,
                "algo.policy_loss.cov_low": 2.0,
                "algo.policy_loss.cov_high": 4.0,
                **_CLIP,
            },
        ),
        # verl's default of ppo_kl_coef is 0.1; here it is the paper's.
        (
            "kl_cov",
            {
                "algo.policy_loss.name": "kl_cov",
                "algo.policy_loss.cov_share": 2e-3,
                "algo.policy_loss.cov_kl_coef": 0.1,
            },
        ),
    ],
)
def test_policy_losses_take_the_options_that_they_read(mode: str, expected: dict[str, Any]) -> None:
    options = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": mode,
        "actor_rollout_ref.actor.clip_ratio_low": 0.1,
        "actor_rollout_ref.actor.clip_ratio_high": 0.3,
        "actor_rollout_ref.actor.tau_neg": 1.2,
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 3e-4,
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb": 2.0,
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub": 4.0,
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": 2e-3,
    }
    converted = convert(PeerOptions(framework="verl", options=options, unreadable={}))
    got = {key: value for key, value in converted.settings.items() if key.startswith("algo.policy_loss.")}
    aggregation = {"algo.aggregation": converted.settings["algo.aggregation"]}
    assert got | aggregation == {"algo.aggregation": "token-mean", "algo.policy_loss.dual_clip": None} | expected
    assert converted.lost == {}
    algo = from_dict(Config, yaml.safe_load(to_run_file(converted, "run.sh"))).algo
    build_algorithm(algo, max_response_tokens=8)


def test_a_value_of_the_wrong_kind_is_listed_and_stops_nothing() -> None:
    options = {
        "data.train_batch_size": "oops",
        "trainer.n_gpus_per_node": "abc",
        "actor_rollout_ref.actor.clip_ratio": [1, 2, 3],
        "actor_rollout_ref.rollout.n": 4,
    }
    converted = convert(PeerOptions(framework="verl", options=options, unreadable={}))
    assert converted.settings["rollout.num_samples"] == 4
    assert {given.partition("=")[0] for given in converted.lost} == set(options) - {"actor_rollout_ref.rollout.n"}
    assert any("expected int" in why for why in converted.lost.values())


_START = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet"


def _convert(tmp_path: Path, script: str, *given: str, command: int | None = None) -> Converted:
    path = tmp_path / "run.sh"
    path.write_text(script)
    return convert(read_peer_file(path, given, command))


def test_what_only_the_machine_decides_is_listed_and_gets_no_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""
if [ -d /data/big ]; then LEN=8192; RATIO=0.3; else LEN=1024; RATIO=0.3; fi
{_START} data.max_response_length=$LEN actor_rollout_ref.actor.clip_ratio=$RATIO trainer.nnodes=$SLURM_NNODES \\
  data.train_batch_size=$(nproc)
"""
    converted = _convert(tmp_path, script)
    assert converted.settings["algo.policy_loss.clip_low"] == 0.3
    # Not even verl's defaults (512, 1 and 1024) take their place, nor what would follow from these.
    follow = {"actor.layout.dp", "rollout.engine.num_engines", "actor.micro_batch_tokens"}
    open_keys = {"rollout.max_response_tokens", "placement.trainer.num_nodes", "trainer.prompts_per_step"}
    assert not (follow | open_keys) & set(converted.settings)
    lost = converted.lost
    assert "[ -d /data/big ]" in lost["data.max_response_length=1024 or 8192"]
    assert "it depends on $SLURM_NNODES" in lost["trainer.nnodes=$SLURM_NNODES"]
    assert "the output of nproc" in lost["data.train_batch_size=$(nproc)"]
    assert follow <= set(lost)
    main(["convert-config", str(tmp_path / "run.sh")])
    printed = capsys.readouterr()
    assert "data.train_batch_size=$(nproc)" in printed.err
    assert load_config_text(printed.out, tmp_path).rollout.max_response_tokens == Config().rollout.max_response_tokens


def load_config_text(text: str, folder: Path) -> Config:
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml")


def test_an_option_that_may_be_given_twice_is_not_decided(tmp_path: Path) -> None:
    more = "ARGS=()\n[ -f fast ] && ARGS+=(actor_rollout_ref.rollout.n=2)\n"
    converted = _convert(tmp_path, f'{more}{_START} actor_rollout_ref.rollout.n=8 "${{ARGS[@]}}"')
    assert "rollout.num_samples" not in converted.settings
    assert "actor_rollout_ref.rollout.n=8 or 2" in converted.lost


def test_several_commands_that_start_training_are_a_choice(tmp_path: Path) -> None:
    script = f"{_START} actor_rollout_ref.rollout.n=4\n{_START} actor_rollout_ref.rollout.n=16\n"
    with pytest.raises(ConfigError, match=r"2 commands start training \(1: line 1; 2: line 2\).*--command"):
        _convert(tmp_path, script)
    assert _convert(tmp_path, script, command=2).settings["rollout.num_samples"] == 16


def test_a_script_that_ends_before_training_says_where(tmp_path: Path) -> None:
    script = f"if [ $# -lt 1 ]; then\n  echo usage\n  exit 1\nfi\n{_START} actor_rollout_ref.rollout.n=$1"
    with pytest.raises(ConfigError, match="line 3: exit"):
        _convert(tmp_path, script)
    assert _convert(tmp_path, script, "6").settings["rollout.num_samples"] == 6


@pytest.mark.parametrize(
    "command",
    [
        "ray job submit --address=x --runtime-env-json='{{}}' -- {} 2>&1 | tee log",
        "nohup env A=b srun -N 1 torchrun --nproc 8 {} > log 2>&1 &",
        'CMD="{}"; $CMD',
        'CMD="{}"; eval "$CMD"',
        "bash -c '{}'",
        'read -r -d "" CMD <<EOF\n{}\nEOF\nif [[ ${{1}} != slurm ]]; then $CMD; fi',
        'run() {{ {} "$@"; }}; run trainer.nnodes=1',
        "exec {}",
    ],
)
def test_ways_to_start(command: str, tmp_path: Path) -> None:
    converted = _convert(tmp_path, command.format(f"{_START} actor_rollout_ref.rollout.n=6"))
    assert converted.settings["rollout.num_samples"] == 6


def test_a_file_that_starts_no_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("echo main\n")
    with pytest.raises(ConfigError, match="no command that starts training"):
        read_peer_file(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_peer_file(tmp_path / "missing.sh")


def test_an_existing_run_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    with pytest.raises(SystemExit):
        main(["convert-config", str(SCRIPTS[0]), "--out", str(out)])
    assert out.read_text() == "mine"
    assert "exists; choose another name" in capsys.readouterr().err


def test_every_default_is_a_known_option_whose_rule_takes_it() -> None:
    for options in DEFAULTS.values():
        for name, value in options.items():
            if name in ALIASES and name != "lr_warmup_ratio":
                assert set(translated(ALIASES[name], value, options)) <= set(ALIASES[name].key.split())
            assert name in ALIASES or name in keys_of(Config)


def test_the_printed_run_file_is_yaml_with_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["convert-config", str(SCRIPTS[0])])
    printed = capsys.readouterr().out
    assert printed.startswith("# Converted from ")
    path = tmp_path / "run.yaml"
    path.write_text(printed)
    assert load_config(path).algo.name == yaml.safe_load(printed)["algo"]["name"]


def test_the_report_has_no_secrets(tmp_path: Path) -> None:
    converted = _convert(
        tmp_path,
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d.jsonl --hf_token s3cret "
        "--remote_rm_url http://user:s3cret@host/score",
    )
    comments = [line for line in to_run_file(converted, "a.sh").splitlines() if line.startswith("#")]
    assert any("hf_token=***masked***" in line for line in comments)
    assert not any("s3cret" in line for line in comments)
