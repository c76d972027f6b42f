"""YAML files, what they build upon, overrides, and the way back to YAML."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.build import algorithm_of
from megarl.config import Config, compose, dump, from_dict, load_config
from megarl.config.algo import AlgoConfig, PolicyLossConfig
from megarl.config.load import packaged, saved_config, with_overrides
from megarl.config.schema import ActorConfig, DataConfig, OptimizerConfig, RolloutConfig, RunConfig
from megarl.errors import ConfigError, UnknownKeyError
from megarl.migrate.aliases import answered

REPO_CONFIGS = Path(__file__).resolve().parents[3] / "configs"
ALGORITHMS = sorted(path.stem for path in (REPO_CONFIGS / "algo").glob("*.yaml"))

FILES = {
    "model/tiny.yaml": "model: {path: models/tiny, dtype: float32}\n",
    "algo/grpo.yaml": "algo: {name: grpo, kl: {where: loss, coef: 1e-3}}\n",
    "algo/dapo.yaml": "algo: {name: dapo, policy_loss: {clip_high: 0.28}}\n",
    "run/common.yaml": (
        "use: {model: tiny, algo: grpo}\n"
        "data: {train: [a.parquet, b.parquet]}\n"
        "trainer: {total_steps: 10, prompts_per_step: 4}\n"
    ),
    "run/long.yaml": "use: {run: common}\ntrainer: {total_steps: 500}\n",
    "run/dapo.yaml": "use: {run: common, algo: dapo}\ndata: {train: [c.parquet]}\n",
}


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    root = tmp_path / "configs"
    for name, text in FILES.items():
        write(root, name, text)
    return root


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message(run_file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- layers


def test_run_file_lies_above_the_files_it_uses(configs: Path) -> None:
    write(configs, "run/own.yaml", "use: {model: tiny, algo: grpo}\nalgo: {kl: {coef: 0.5}}\n")
    config = load_config(configs / "run/own.yaml")
    assert config.model.path == "models/tiny"
    assert config.algo.kl.where == "loss"  # merged deeply: the sibling of coef stays
    assert config.algo.kl.coef == 0.5


def test_groups_merge_in_the_order_of_use(configs: Path) -> None:
    write(configs, "model/loud.yaml", "run: {name: from-model}\n")
    write(configs, "algo/loud.yaml", "run: {name: from-algo}\n")
    model_last = write(configs, "run/a.yaml", "use: {algo: loud, model: loud}\n")
    algo_last = write(configs, "run/b.yaml", "use: {model: loud, algo: loud}\n")
    assert load_config(model_last).run.name == "from-model"
    assert load_config(algo_last).run.name == "from-algo"


def test_run_file_builds_upon_another(configs: Path) -> None:
    config = load_config(configs / "run/long.yaml")
    assert (config.trainer.total_steps, config.trainer.prompts_per_step) == (500, 4)
    assert config.algo.name == "grpo"


def test_choice_of_a_group_replaces_that_of_the_base(configs: Path) -> None:
    config = load_config(configs / "run/dapo.yaml")
    assert config.algo.name == "dapo"
    assert config.algo.kl == Config().algo.kl  # nothing is left of algo/grpo.yaml
    assert config.data.train == ("c.parquet",)  # lists replace


def test_use_takes_a_path_relative_to_the_working_directory(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "mine.yaml", "algo: {name: mine}\n")
    run_file = write(configs, "run/own.yaml", "use: {algo: mine.yaml}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(run_file).algo.name == "mine"


@pytest.mark.parametrize(("cwd", "run_file"), [("run", "long.yaml"), (".", "run/long.yaml")])
def test_relative_run_file(configs: Path, monkeypatch: pytest.MonkeyPatch, cwd: str, run_file: str) -> None:
    monkeypatch.chdir(configs / cwd)
    assert load_config(Path(run_file)).model.path == "models/tiny"


def test_a_run_file_that_comes_with_megarl_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("configs/run/sums-rl.yaml")).run.name == "grpo"
    mine = tmp_path / "configs" / "run" / "sums-rl.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("run: {name: mine}\n")
    assert load_config(Path("configs/run/sums-rl.yaml")).run.name == "mine"


def test_paths_in_a_config_are_kept_as_written(configs: Path) -> None:
    assert load_config(configs / "run/common.yaml").data.train == ("a.parquet", "b.parquet")


def test_empty_file_is_the_defaults(configs: Path) -> None:
    assert load_config(write(configs, "run/empty.yaml", "# nothing\n")) == Config()


def test_compose_leaves_use_out_of_the_tree(configs: Path) -> None:
    assert compose(configs / "run/long.yaml") == {
        "model": {"path": "models/tiny", "dtype": "float32"},
        "algo": {"name": "grpo", "kl": {"where": "loss", "coef": "1e-3"}},
        "data": {"train": ["a.parquet", "b.parquet"]},
        "trainer": {"total_steps": 500, "prompts_per_step": 4, "total_epochs": None},
    }


def test_settings_for_some_algorithms_alone(configs: Path) -> None:
    """They lie above the run file that gives them, and below the run file that builds upon it and the overrides."""
    own = "use: {run: common}\nfor_algo:\n  da*: {trainer: {total_steps: 7}, critic: {freeze: true}}\n"
    run_file = write(configs, "run/own.yaml", own + "trainer: {total_steps: 6}\n")
    assert load_config(run_file).trainer.total_steps == 6
    assert not load_config(run_file).critic.freeze
    chosen = load_config(run_file, ["use.algo=dapo"])
    assert (chosen.trainer.total_steps, chosen.critic.freeze) == (7, True)
    assert load_config(run_file, ["use.algo=dapo", "trainer.total_steps=9"]).trainer.total_steps == 9
    above = write(configs, "run/above.yaml", "use: {run: own, algo: dapo}\ntrainer: {total_steps: 8}\n")
    assert load_config(above).trainer.total_steps == 8
    write(configs.parent, "dare.yaml", "algo: {name: dare}\n")
    assert load_config(run_file, [f"use.algo={configs.parent}/dare.yaml"]).trainer.total_steps == 7


def test_for_algo_names_algorithm_files(configs: Path) -> None:
    wrong = write(configs, "run/wrong.yaml", "use: {run: common}\nfor_algo: {dappo: {trainer: {total_steps: 7}}}\n")
    assert message(wrong) == (f"for_algo.dappo: no algorithm file has this name; there are: {', '.join(ALGORITHMS)}")
    wrong.write_text("for_algo: {dapo: 3}\n")
    assert message(wrong).startswith("for_algo: got {'dapo': 3}, expected settings by the name of an algorithm file")
    wrong.write_text("use: {algo: dapo}\nfor_algo: {dapo: {trainer: {steps: 3}}}\n")
    assert message(wrong).startswith("unknown key 'trainer.steps'")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_quick_start_has_a_critic_of_its_own_where_there_is_one(name: str) -> None:
    """A critic of the tiny model learns at 1e-3; without a critic its settings are the defaults."""
    config = load_config(REPO_CONFIGS / "run/sums-rl.yaml", [f"use.algo={name}"])
    optimizer = config.critic.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == ((1e-3, 0.0) if name.startswith("ppo") else (1e-5, 0.01))
    algorithm_of(config)


def test_anchors_and_merge_keys(configs: Path) -> None:
    text = "rollout: {engine: &e {block_size: 16}}\nlogging: {<<: {num_rollouts: 3}, num_rollouts: 4}\n"
    config = load_config(write(configs, "run/anchors.yaml", text))
    assert config.rollout.engine.block_size == 16
    assert config.logging.num_rollouts == 4


# --- overrides


def test_overrides_lie_on_top_and_are_yaml(configs: Path) -> None:
    config = load_config(
        configs / "run/common.yaml",
        [
            "actor.optimizer.lr=1e-5",
            "data.train=[x.parquet, y.parquet]",
            "algo.policy_loss.dual_clip=null",
            "sync.verify=true",
            "run.name=a=b",
            "actor.layout={tp: 2}",
            "trainer.total_steps=7",
            "trainer.total_steps=8",
        ],
    )
    assert config.actor.optimizer.lr == 1e-5
    assert config.data.train == ("x.parquet", "y.parquet")
    assert config.algo.policy_loss.dual_clip is None
    assert config.sync.verify is True
    assert config.run.name == "a=b"
    assert config.actor.layout.tp == 2
    assert config.trainer.total_steps == 8  # the last wins
    assert config.trainer.prompts_per_step == 4


@pytest.mark.parametrize("section", ["trainer", "sft", "train_reward", "train_preference"])
def test_a_later_length_replaces_an_earlier_one(configs: Path, section: str) -> None:
    """In steps or in epochs, as if these were one setting."""
    run = write(configs, "run/r.yaml", f"{section}: {{total_epochs: 3}}")
    assert getattr(load_config(run, [f"{section}.total_steps=4"]), section).total_epochs is None
    assert getattr(load_config(run, ["run.seed=1"]), section).total_epochs == 3
    run = write(configs, "run/r.yaml", f"{section}: {{total_steps: 4}}")
    assert getattr(load_config(run, [f"{section}.total_epochs=3"]), section).total_epochs == 3
    with pytest.raises(ConfigError, match=f"^{section}.total_epochs: got 3 beside {section}.total_steps=5; leave one"):
        load_config(run, [f"{section}.total_steps=5", f"{section}.total_epochs=3"])


def test_override_chooses_another_file_before_merging(configs: Path) -> None:
    config = load_config(configs / "run/long.yaml", ["use.algo=dapo", "algo.name=mine"])
    assert config.algo.policy_loss.clip_high == 0.28
    assert config.algo.kl.where == "none"
    assert config.algo.name == "mine"
    assert config.trainer.total_steps == 500


def test_override_chooses_another_base(configs: Path) -> None:
    config = load_config(configs / "run/long.yaml", ["use.run=dapo"])
    assert (config.algo.name, config.data.train) == ("dapo", ("c.parquet",))


@pytest.mark.parametrize("override", ["trainer.total_steps", "=3", "actor..lr=1", ".lr=1", ""])
def test_malformed_override(configs: Path, override: str) -> None:
    assert message(configs / "run/common.yaml", override) == (
        f"override {override!r}: expected key=value, such as actor.optimizer.lr=1e-5"
    )


def test_override_that_is_not_yaml(configs: Path) -> None:
    got = message(configs / "run/common.yaml", "data.train=[a.parquet")
    assert got.startswith("override of data.train: not valid YAML: ")


@pytest.mark.parametrize("value", ["Use # signs", "#", "'a' # b", "[a] #b"])
def test_override_of_which_yaml_would_drop_a_part(configs: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"^override of data\.system_prompt: YAML takes '#.*' for a comment; quote"):
        load_config(configs / "run/common.yaml", [f"data.system_prompt={value}"])
    config = load_config(configs / "run/common.yaml", ["data.system_prompt='Use # signs'", "run.name=a#b"])
    assert (config.data.system_prompt, config.run.name) == ("Use # signs", "a#b")


@pytest.mark.parametrize("text", ["010", "-010", "007_1", "1:30", "1:02:03.5", "2026-01-31", "2026-01-31T10:00:00Z"])
def test_numbers_and_dates_of_yaml_11_alone_are_texts(configs: Path, text: str) -> None:
    """As YAML 1.2 has it. PyYAML reads 8, -8, 57, 90, 3723.5 and dates."""
    run_file = configs / "run/common.yaml"
    with pytest.raises(ConfigError, match=rf"^run\.seed: got '{text}' \(str\), expected int"):
        load_config(run_file, [f"run.seed={text}"])
    write(configs, "run/own.yaml", f"run: {{name: {text}}}\n")
    for config in (load_config(run_file, [f"run.name={text}"]), load_config(configs / "run/own.yaml")):
        assert config.run.name == text
        assert from_dict(Config, yaml.safe_load(dump(config))) == config
    assert [load_config(run_file, [f"run.seed={n}"]).run.seed for n in ("0", "-0", "0x10", "1_000")] == [0, 0, 16, 1000]


def test_override_below_a_value(configs: Path) -> None:
    assert message(configs / "run/common.yaml", "run.name.first=x") == (
        "run.name: got {'first': 'x'} (dict), expected str"
    )


# --- files that are wrong


def test_missing_group_file_lists_what_exists(configs: Path) -> None:
    assert message(configs / "run/common.yaml", "use.algo=gpro") == (
        f"use.algo: no file gpro.yaml in {configs}/algo or {REPO_CONFIGS}/algo; did you mean 'grpo'? "
        f"there are: {', '.join(ALGORITHMS)}"
    )


def test_missing_run_file_lists_what_exists(configs: Path) -> None:
    assert message(configs / "run/nope.yaml") == (
        f"no file {configs}/run/nope.yaml; {configs}/run has: common.yaml, dapo.yaml, long.yaml"
    )


def test_a_run_file_anywhere_finds_the_files_that_come_with_megarl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name: the model, the algorithm and a base; by path, from another directory, the published sizes."""
    run_file = write(tmp_path, "mine.yaml", "use: {run: gsm8k-qwen3-8b, algo: cpo}\nrun: {name: mine}\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("mine.yaml"))
    assert config == load_config(REPO_CONFIGS / "run/gsm8k-qwen3-8b.yaml", ["use.algo=cpo", "run.name=mine"])
    assert config.model.config_path is not None
    assert packaged(config.model.config_path) == str(REPO_CONFIGS / "model/hf/qwen3-8b")
    assert message(run_file, "use.model=qwen4").startswith(
        f"use.model: no file qwen4.yaml in {tmp_path.parent}/model or {REPO_CONFIGS}/model; did you mean 'qwen3-4b'? "
        "there are: deepseek-v3, "
    )


def test_own_files_go_before_those_that_come_with_megarl(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(configs / "run/common.yaml", ["use.algo=dapo"]).algo.policy_loss.clip_high == 0.28
    assert load_config(configs / "run/common.yaml", ["use.algo=gspo"]).algo.name == "gspo"
    write(configs.parent, "configs/model/hf/qwen3-8b/config.json", "{}")
    monkeypatch.chdir(configs.parent)
    assert packaged("configs/model/hf/qwen3-8b") == "configs/model/hf/qwen3-8b"
    assert packaged("nowhere") == "nowhere"


@pytest.mark.parametrize("use", ["grpo", "{algo: null}", "{algo: [grpo]}"])
def test_malformed_use(configs: Path, use: str) -> None:
    run_file = write(configs, "run/bad.yaml", f"use: {use}\n")
    got = message(run_file)
    assert got.startswith(f"{run_file}: use: got ")
    assert got.endswith("expected file names by group, as in {algo: grpo}")


def test_group_file_may_not_use_others(configs: Path) -> None:
    path = write(configs, "algo/nested.yaml", "use: {algo: grpo}\n")
    assert message(configs / "run/common.yaml", "use.algo=nested") == (
        f"{path}: use: only run files may use others; name the files in the run file"
    )


def test_run_files_in_a_circle(configs: Path) -> None:
    first = write(configs, "run/first.yaml", "use: {run: second}\n")
    write(configs, "run/second.yaml", "use: {run: first}\n")
    assert message(first) == f"{first}: builds upon itself; remove the circle of use.run"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {seed: 1}\nmodel: {path: m}\nrun: {seed: 2}\n", 3),
        ("run:\n  seed: 1\n  seed: 1\n", 3),
        ("actor: {layout: {tp: 1, tp: 2}}\n", 1),
    ],
)
def test_duplicate_keys(configs: Path, text: str, line: int) -> None:
    run_file = write(configs, "run/twice.yaml", text)
    got = message(run_file)
    assert got.startswith(f"{run_file}: not valid YAML: duplicate key ")
    assert f"at line {line}, column " in got


@pytest.mark.parametrize("text", ["run: [1\n", "run: {seed: 0x_}\n", "run: \tx: 1\n", "a: *missing\n"])
def test_text_that_is_not_yaml(configs: Path, text: str) -> None:
    run_file = write(configs, "run/broken.yaml", text)
    assert message(run_file).startswith(f"{run_file}: not valid YAML: ")


def test_bytes_that_are_not_text(configs: Path) -> None:
    run_file = configs / "run/binary.yaml"
    run_file.write_bytes(b"run: \xff\xfe\n")
    assert message(run_file).startswith(f"{run_file}: not valid YAML: ")


def test_file_that_is_not_a_mapping(configs: Path) -> None:
    run_file = write(configs, "run/list.yaml", "- a\n")
    assert message(run_file) == f"{run_file}: got a list, expected a mapping of configuration keys; correct it"


# --- round trip


def test_dump_loads_back_to_an_equal_config(configs: Path) -> None:
    config = Config(
        run=RunConfig(name="1e5", dir="null", seed=7),
        data=DataConfig(
            train=("a b.parquet", "ü: {x}.jsonl"),
            val=(),
            chat_template={"enable_thinking": False, "x": [None, 1, -2.5, {"y": "no"}]},
        ),
        algo=AlgoConfig(policy_loss=PolicyLossConfig(dual_clip=None), aggregation_horizon_tokens=64),
        actor=ActorConfig(optimizer=OptimizerConfig(lr=1e-6, betas=(0.9, 0.999), eps=1e-30)),
        rollout=RolloutConfig(replay_dir="~records"),
    )
    assert load_config(write(configs, "run/dumped.yaml", dump(config))) == config


def test_dump_holds_every_key() -> None:
    assert from_dict(Config, yaml.safe_load(dump(Config()))) == Config()
    assert "vocab_multiple: 128" in dump(Config())


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    lr=finite,
    betas=st.tuples(finite, finite),
    dual_clip=st.none() | finite,
    seed=st.integers(),
    horizon=st.none() | st.integers(),
    name=st.text(st.characters(codec="utf-8")),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    lr: float,
    betas: tuple[float, float],
    dual_clip: float | None,
    seed: int,
    horizon: int | None,
    name: str,
) -> None:
    config = Config(
        run=RunConfig(seed=seed, name=name),
        algo=AlgoConfig(policy_loss=PolicyLossConfig(dual_clip=dual_clip), aggregation_horizon_tokens=horizon),
        actor=ActorConfig(optimizer=OptimizerConfig(lr=lr, betas=betas)),
        data=DataConfig(train=(name, name)),
    )
    run_file = write(tmp_path_factory.getbasetemp(), "round_trip.yaml", dump(config))
    assert repr(load_config(run_file)) == repr(config)  # repr tells -0.0 from 0.0


def test_every_run_file_loads_and_one_in_six_round_trips(configs: Path) -> None:
    """The run files of the repository, and those written here, so that the check never runs on nothing."""
    run_files = [*sorted((configs / "run").glob("*.yaml")), *sorted((REPO_CONFIGS / "run").glob("*.yaml"))]
    for number, run_file in enumerate(run_files):
        config = load_config(run_file)
        if number < 3 or number % 6 == 0:
            assert from_dict(Config, yaml.safe_load(dump(config))) == config, run_file


def test_with_overrides() -> None:
    config = from_dict(Config, {"data": {"train": ["a.parquet", {"path": "b.jsonl", "weight": 2}]}, "run": {"seed": 3}})
    changed = with_overrides(config, ["run.name=b", "actor.optimizer.lr=1e-5"])
    assert (changed.run.name, changed.run.seed, changed.data) == ("b", 3, config.data)
    assert changed.actor.optimizer.lr == 1e-5
    assert with_overrides(config, []) == config
    with pytest.raises(ConfigError, match=r"unknown key 'run\.nmae'"):
        with_overrides(config, ["run.nmae=b"])


def test_filters_of_earlier_runs_go_on_judging_rewards() -> None:
    assert saved_config({"algo": {"filter": {"mean_score": [-1.0, 1.0]}}}).algo.filter.by == "reward"
    assert saved_config({"algo": {"filter": {"by": "score"}}}).algo.filter.by == "score"
    assert saved_config({"algo": {}}).algo.filter.by == "correct"


def test_what_a_run_saved_loads_without_settings_that_are_gone() -> None:
    saved = {"sync": {"transport": "bridge", "delta": True}, "run": {"name": "old"}}
    config = saved_config(saved)
    assert (config.sync.delta, config.run.name) == (True, "old")
    # What was given is not changed.
    assert saved["sync"] == {"transport": "bridge", "delta": True}
    with pytest.raises(UnknownKeyError) as caught:
        from_dict(Config, saved)
    assert str(answered(caught.value)).startswith("unknown key 'sync.transport', of earlier versions (the bridge is")
    with pytest.raises(ConfigError, match=r"^unknown key 'sync\.xyzzy'"):
        saved_config({"sync": {"xyzzy": 1}})
