"""What is evaluated and with which settings; mistakes in one line with exit code 2 before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import dump, load_config
from megarl.config.lora import LoraConfig
from megarl.config.schema import Config, LayoutConfig, ModelConfig
from megarl.errors import ConfigError
from megarl.record.checkpoints import RunState
from megarl.record.metrics import MARKER, STATE_FILE
from megarl.run.evaluation.inputs import EvalInputs, EvalRequest, open_eval_inputs
from megarl.types import AlgoState
from megarl.weights.families import read_model_spec
from megarl.weights.peft_files import create_adapter_files
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles, generate
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hostile_pickles import ATTACKS, write_role

REPOSITORY = Path(__file__).parents[4]
RUN_FILE = REPOSITORY / "configs" / "run" / "sums-rl.yaml"
# The model has 512 positions.
SHORT = ("data.max_prompt_tokens=64",)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    sizes = GenerateConfig(seed=0, num_sft=4, num_train=8, num_val=4)
    return generate(TASKS.get("sums"), tmp_path_factory.mktemp("sums"), sizes)


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def model(made_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made_model, tmp_path / "model"))


@pytest.fixture
def opened(sums: TaskFiles, tmp_path: Path) -> Callable[..., EvalInputs]:
    def open_it(model: Path, *overrides: str, **changes: object) -> EvalInputs:
        settings: dict[str, object] = {"max_response_tokens": 32, "data": (sums.val, sums.train)}
        request = settings | {"model": model, "out": tmp_path / "out", "overrides": (*SHORT, *overrides)} | changes
        return open_eval_inputs(EvalRequest(**request))  # type: ignore[arg-type]

    return open_it


def make_run(root: Path, model: Path, *overrides: str) -> Config:
    """A run's directory: its configuration and its export."""
    config = load_config(RUN_FILE, [f"model.path={model}", *overrides])
    root.mkdir()
    (root / "config.yaml").write_text(dump(config))
    shutil.copytree(model, root / "export")
    return config


def test_a_model_may_be_named_by_its_hub_id(
    opened: Callable[..., EvalInputs], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(model) if name == "org/it" else "")
    assert opened(Path("org/it")).config.model.path == str(model)


def make_state(path: Path, config: Config) -> Path:
    """What the driver writes of a checkpoint."""
    state = RunState(
        command="train",
        step=7,
        num_optimizer_steps=7,
        sampler={},
        algo=AlgoState(),
        source={},
        score=None,
        config=config,
    )
    path.mkdir(parents=True)
    (path / STATE_FILE).write_text(state.to_json())
    (path / MARKER).touch()
    return path


def test_a_model_directory(opened: Callable[..., EvalInputs], model: Path) -> None:
    inputs = opened(model, "rollout.engine.max_num_seqs=32", ks=(4, 1, 4), num_samples=4, temperature=0.7, seed=5)
    config = inputs.config
    assert config.model == ModelConfig(path=str(model), dtype="float32")
    assert (config.rollout.num_samples, config.rollout.temperature, config.run.seed) == (4, 0.7, 5)
    assert config.rollout.engine.max_num_seqs == 32
    assert config.rollout.max_response_tokens == 32
    assert inputs.ks == (1, 4)
    assert config.rollout.stop_token_ids == (2,)
    assert inputs.checkpoint is None
    # Four prompts for validation, eight for training.
    assert inputs.labels == ("val.parquet",) * 4 + ("train.parquet",) * 8
    # Engines alone, on devices of their own.
    assert (config.placement.mode, config.actor.layout) == ("split", LayoutConfig())


def test_half_precision_weights_are_evaluated_as_bfloat16(opened: Callable[..., EvalInputs], model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert opened(model).config.model.dtype == "bfloat16"


def test_a_model_that_only_the_engine_knows(opened: Callable[..., EvalInputs], model: Path) -> None:
    """vLLM runs families that no table of ours describes."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["GemmaForCausalLM"]}))
    assert opened(model).checkpoint is None


def test_a_run_is_evaluated_with_its_own_settings(opened: Callable[..., EvalInputs], model: Path) -> None:
    """Response limit, engine and dtype come from the run, the layout does not matter."""
    run = model.parent / "run"
    make_run(run, model, "rollout.engine.kv_cache_mib=48", "rollout.max_response_tokens=40")
    config = opened(run, max_response_tokens=None).config
    assert config.model.path == str(run / "export")
    assert (config.rollout.engine.kv_cache_mib, config.rollout.max_response_tokens) == (48, 40)
    assert config.actor.layout == LayoutConfig()


def test_a_run_is_evaluated_with_its_arguments_of_the_chat_template(
    opened: Callable[..., EvalInputs], model: Path
) -> None:
    plain = opened(model).data[0]
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if greeting is defined %}{{ greeting }}{% endif %}")
    assert opened(model).data[0] == plain
    make_run(model.parent / "run", model, "data.chat_template.greeting=Hello")
    inputs = opened(model.parent / "run")
    assert inputs.tokenizer.decode(inputs.data[0].token_ids[len(plain.token_ids) :]) == "Hello"


def test_a_checkpoint_is_evaluated_by_ranks_of_its_layout(opened: Callable[..., EvalInputs], model: Path) -> None:
    run = model.parent / "run"
    config = make_run(run, model)
    inputs = opened(make_state(run / "checkpoints" / "step_000007", config))
    assert inputs.checkpoint is not None
    assert inputs.checkpoint.state.step == 7
    assert inputs.config.model == config.model
    assert inputs.config.actor.layout == config.actor.layout
    assert inputs.config.actor.layout.dp == 2
    assert inputs.config.placement == config.placement


def test_a_run_file_decides_engine_and_layout(opened: Callable[..., EvalInputs], model: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "configs" / "run" / "mine.yaml"
    run_file.parent.mkdir(parents=True)
    run_file.write_text("rollout: {engine: {num_engines: 2, kv_cache_mib: 32}}\nmodel: {dtype: bfloat16}\n")
    config = opened(model, run_file=run_file).config
    assert (config.rollout.engine.num_engines, config.rollout.engine.kv_cache_mib) == (2, 32)
    assert (config.model.path, config.model.dtype) == (str(model), "bfloat16")
    run = model.parent / "run"
    checkpoint = make_state(run / "checkpoints" / "step_000007", make_run(run, model))
    config = opened(checkpoint, "rollout.engine.num_engines=1", run_file=run_file).config
    # The checkpoint's model, the file's layout.
    assert (config.model.dtype, config.actor.layout) == ("float32", LayoutConfig())


@pytest.fixture
def adapters(model: Path) -> Path:
    lora = LoraConfig(rank=2, targets=("attention",))
    return create_adapter_files(model.parent / "adapters", read_model_spec(model), lora, "float32").parent


def test_adapters_are_for_the_model_that_is_named(
    opened: Callable[..., EvalInputs], model: Path, adapters: Path
) -> None:
    inputs = opened(model, adapter=adapters)
    assert (inputs.config.model.path, inputs.adapter, inputs.checkpoint) == (str(model), adapters, None)
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json.*it is a whole model"):
        opened(model, adapter=model)
    make_state(model.parent / "step", load_config(RUN_FILE, [f"model.path={model}"]))
    with pytest.raises(ConfigError, match=r"--adapter: .*step is a checkpoint, which has its own weights"):
        opened(model.parent / "step", adapter=adapters)


def test_a_run_that_has_ended_with_adapters(opened: Callable[..., EvalInputs], model: Path, adapters: Path) -> None:
    run = model.parent / "run"
    make_run(run, model, "rollout.engine.kv_cache_mib=48", "actor.lora.rank=2")
    shutil.rmtree(run / "export")
    shutil.copytree(adapters, run / "export_adapter")
    inputs = opened(run)
    assert (inputs.config.model.path, inputs.adapter) == (str(model), run / "export_adapter")
    assert inputs.config.rollout.engine.kv_cache_mib == 48
    # Engines read merged weights.
    assert inputs.config.actor.lora is None
    with pytest.raises(ConfigError, match="has ended with adapters of its own"):
        opened(run, adapter=adapters)


def test_the_adapters_of_a_checkpoint_are_its_own(opened: Callable[..., EvalInputs], model: Path) -> None:
    """Those with which they began may be gone; a run file does not take them away."""
    began = ["actor.lora.rank=2", "actor.lora.path=gone"]
    checkpoint = make_state(model.parent / "step", load_config(RUN_FILE, [f"model.path={model}", *began]))
    for given in (None, RUN_FILE):
        assert opened(checkpoint, run_file=given).config.actor.lora == LoraConfig(rank=2)


def test_engines_keep_the_nodes_of_a_split_run(opened: Callable[..., EvalInputs], model: Path) -> None:
    run = model.parent / "run"
    make_run(run, model, "placement.mode=split", "rollout.engine.num_engines=2", "placement.engines.num_nodes=2")
    assert opened(run).config.placement.engines.num_nodes == 2


@pytest.fixture(autouse=True)
def nothing_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster would be a failure."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a cluster was started")

    monkeypatch.setattr("megarl.cluster.cluster.Cluster", refuse)


@pytest.fixture
def error_of(model: Path, sums: TaskFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`megarl eval` with a mistake; the one line that it prints."""

    def run(*arguments: str, model_path: Path = model, data: str = str(sums.val)) -> str:
        given = ["eval", str(model_path), *SHORT, "--data", data, "--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit) as exit_info:
            main([*given, "--max-response-tokens", "32", *arguments])
        output = capsys.readouterr()
        assert exit_info.value.code == 2
        # A slow machine's command says every few seconds what it is doing.
        assert [line for line in output.out.splitlines() if not line.startswith("… ")] == []
        (line,) = output.err.splitlines()
        assert line.startswith("error: ")
        assert not (tmp_path / "out" / "config.yaml").exists()
        return line

    return run


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--k", "1", "9"], ["--k: got 9, expected 1 to --num-samples=8; change either"]),
        (["--k", "0"], ["--k: got 0"]),
        (["--num-samples", "0"], ["--k: got 1, expected 1 to --num-samples=0"]),
        (["--temperature", "0"], ["rollout.temperature: got 0.0, expected > 0"]),
        (["--max-response-tokens", "512"], ["= 576, but the model has max_position_embeddings=512"]),
        (["rollout.temperature=0.5"], ["--temperature decides that; remove it"]),
        (["rollout.engin.tp=2"], ["unknown key 'rollout.engin'; did you mean 'rollout.engine'?"]),
        (["rollout.engine.tp=3"], ["rollout.engine.tp: got 3, which does not divide the model"]),
        (["--config", "nowhere.yaml"], ["no file nowhere.yaml"]),
    ],
)
def test_mistakes(error_of: Callable[..., str], arguments: list[str], parts: list[str]) -> None:
    line = error_of(*arguments)
    assert [part for part in parts if part not in line] == [], line


def test_no_model(error_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    line = error_of(model_path=tmp_path / "empty")
    assert "empty: not a model; expected a Hugging Face directory (with config.json), a run with an export" in line


def test_a_spoiled_model(error_of: Callable[..., str], model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"12345")
    assert f"{model / 'model.safetensors'}: not a safetensors file: 5 bytes; copy the model again" in error_of()
    (model / "model.safetensors").unlink()
    assert f"{model / 'model.safetensors'} does not exist" in error_of()
    (model / "config.json").write_text("{")
    assert "config.json: not JSON" in error_of()


@pytest.fixture
def attacked(model: Path, tmp_path: Path) -> Config:
    """The configuration of a run in which an agent's module, if anything loaded it, would create the file `mark`."""
    module = tmp_path / "agent.py"
    module.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\ndef solve(): pass\n")
    entry = f"{{type: agent, rehearse: false, arguments: {{agent: {module}:solve}}}}"
    return make_run(model.parent / "run", model, f"environment.entries.mine={entry}", "environment.default=mine")


@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_what_a_foreign_configuration_names_does_not_run(
    error_of: Callable[..., str], attacked: Config, model: Path, tmp_path: Path, is_checkpoint: bool
) -> None:
    path = model.parent / "run"
    if is_checkpoint:
        path = make_state(path / "checkpoints" / "step_000007", attacked)
    line = error_of(model_path=path)
    assert line.startswith(f"error: {path}: its configuration names code, commands, services or rights of programs: ")
    assert "environment.default: 'mine'; environment.entries: {'mine'" in line
    assert "add --trust-config if you trust its author, or give a run file of yours with --config" in line
    assert not (tmp_path / "mark").exists()


def test_the_cluster_of_a_run_is_not_joined_again(opened: Callable[..., EvalInputs], model: Path) -> None:
    """Jobs of Slurm write its address into the run's settings."""
    make_run(model.parent / "run", model, "cluster.address=elsewhere:6379", "cluster.hosts=[elsewhere]")
    config = opened(model.parent / "run").config
    assert (config.cluster.address, config.cluster.hosts) == (None, ())
    assert opened(model.parent / "run", "cluster.address=here:6379").config.cluster.address == "here:6379"


def test_a_trusted_configuration_counts_and_a_run_file_replaces_it(
    opened: Callable[..., EvalInputs], attacked: Config, model: Path, tmp_path: Path
) -> None:
    path, run_file = make_state(model.parent / "run" / "checkpoints" / "step_000007", attacked), tmp_path / "own.yaml"
    run_file.write_text("rollout: {engine: {kv_cache_mib: 32}}\n")
    config = opened(path, run_file=run_file).config
    assert (config.environment, config.model) == (Config().environment, attacked.model)
    assert not (tmp_path / "mark").exists()
    assert opened(path, trust_config=True).config.environment == attacked.environment
    assert (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_checkpoint_that_could_run_code(
    error_of: Callable[..., str], model: Path, tmp_path: Path, attack: str
) -> None:
    run, mark = model.parent / "run", tmp_path / "mark"
    path = make_state(run / "checkpoints" / "step_000007", make_run(run, model))
    write_role(path / "actor")
    file = ATTACKS[attack](path / "actor", mark)
    assert error_of(model_path=path).startswith(f"error: {file}: ")
    assert not mark.exists()


def test_bad_data(error_of: Callable[..., str], tmp_path: Path) -> None:
    assert "nowhere.parquet: no such file" in error_of(data=str(tmp_path / "nowhere.parquet"))
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"style": "rule", "ground_truth": "1"}}
    (tmp_path / "bare.jsonl").write_text(json.dumps({"prompt": row["prompt"]}) + "\n")
    assert "column 'reward_model' is missing" in error_of(data=str(tmp_path / "bare.jsonl"))
    (tmp_path / "chess.jsonl").write_text(json.dumps({**row, "data_source": "megarl/chess"}) + "\n")
    assert "megarl/chess" in error_of(data=str(tmp_path / "chess.jsonl"))


def test_a_file_given_twice(error_of: Callable[..., str], sums: TaskFiles) -> None:
    assert f"--data: {sums.val} is there twice" in error_of("--data", str(sums.val), str(sums.val))


def test_an_evaluation_is_not_overwritten(error_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.parquet").touch()
    assert "out already holds an evaluation; choose another --out, or pass --overwrite" in error_of()
