"""Open and check what an evaluation reads before any process starts."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import load_config
from megarl.config.check import check_eval
from megarl.config.check_model import check_model
from megarl.config.load import saved_config, with_overrides
from megarl.config.schema import Config, LayoutConfig, ModelConfig, NodesConfig, PlacementConfig
from megarl.config.setting import needing_trust
from megarl.data.answers import Answers
from megarl.data.chat import load_tokenizer
from megarl.data.images import DataImages
from megarl.data.prompts import PromptDataset
from megarl.data.vocabulary import Vocabulary
from megarl.environments import tools_of
from megarl.errors import ConfigError
from megarl.host.masking import masked
from megarl.record.checkpoints import Checkpoint, read_checkpoint
from megarl.record.metrics import STATE_FILE, RunPaths
from megarl.report.run import path_labels
from megarl.rewards.build import check_ground_truths
from megarl.run.evaluation.output import TABLE
from megarl.run.first_checks import check_prompts, unreached_servers
from megarl.train.export import exported
from megarl.train.inputs import check_askers, check_image_engines, open_model
from megarl.train.rehearsal import rehearse
from megarl.weights.families import read_hf_config, read_model_spec
from megarl.weights.hub import local_model
from megarl.weights.peft_files import read_peft
from megarl.weights.safetensors_headers import model_files, read_header
from megarl.weights.tables import VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The most of a setting that a message shows.
_MAX_SETTING_CHARS = 160
# Settings that come from command-line options, and so cannot be overridden.
_OPTIONS = {
    "model.path": "MODEL",
    "data.train": "--data",
    "data.val": "--data",
    "rollout.num_samples": "--num-samples",
    "rollout.temperature": "--temperature",
    "rollout.max_response_tokens": "--max-response-tokens",
    "run.seed": "--seed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """The request for an evaluation; `model`: a Hugging Face directory, a run, RUN/checkpoints/step_N."""

    model: Path
    data: tuple[Path, ...]
    out: Path
    adapter: Path | None = None  # To merge into the model, as PEFT writes it.
    ks: tuple[int, ...] = (1,)
    num_samples: int = 8
    temperature: float = 1.0
    max_response_tokens: int | None = None  # None: the configuration's.
    seed: int = 0
    run_file: Path | None = None  # Engine and layout; None: the run's own, or defaults.
    overrides: tuple[str, ...] = ()
    overwrite: bool = False
    trust_config: bool = False  # Take the run's own settings also where they name what would run here.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInputs:
    """The checked inputs of an evaluation: all that it needs besides a cluster.

    checkpoint: None if the engines read the model themselves; then `adapter`, if there is one, has to be merged into
    it. labels: the name of each prompt's data file.
    """

    config: Config
    checkpoint: Checkpoint | None
    adapter: Path | None
    tokenizer: "PreTrainedTokenizerBase"
    data: PromptDataset
    labels: tuple[str, ...]
    ks: tuple[int, ...]
    out: Path


def open_eval_inputs(request: EvalRequest) -> EvalInputs:
    """Check the request, and open the model and the data that it names."""
    if (request.out / TABLE).exists() and not request.overwrite:
        raise ConfigError(f"{request.out} already holds an evaluation; choose another --out, or pass --overwrite")
    if RunPaths(request.out).metrics.exists():
        raise ConfigError(
            f"--out: {request.out} is the directory of a run, whose config.yaml this would replace; choose another, "
            f"such as {request.out / 'eval'}"
        )
    if bad := [k for k in request.ks if not 1 <= k <= request.num_samples]:
        raise ConfigError(f"--k: got {bad[0]}, expected 1 to --num-samples={request.num_samples}; change either")
    files = [path.resolve() for path in request.data]
    if twice := next((path for path in files if files.count(path) > 1), None):
        raise ConfigError(f"--data: {twice} is there twice; name it once")
    for override in request.overrides:
        if option := _OPTIONS.get(override.partition("=")[0].strip()):
            raise ConfigError(f"override {override!r}: {option} decides that; remove it")
    base, checkpoint, adapter = _find_model(request)
    config = _eval_config(with_overrides(base, request.overrides), request, with_trainer=checkpoint is not None)
    check_eval(rehearse(config))
    for mistake in unreached_servers(config, ("rewards",))[0]:
        raise ConfigError(mistake)
    num_rows = _engine_model_rows(config) if checkpoint is None else open_model(config).dims.vocab
    if adapter is not None:
        found = read_peft(adapter, read_model_spec(config.model.path, "MODEL"))
        if VALUE_HEAD in found.replaced:
            raise ConfigError(
                f"{adapter}: has {VALUE_HEAD}, so it is a reward model's or critic's; evaluate a policy's"
            )
    check_image_engines(config)
    check_prompts(config, config.data.val)
    images = DataImages.of(config.model.path, config.data, config.image_store)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    stop_tokens = Answers.of(config.model, config.rollout, tokenizer).stop_tokens
    config = replace(config, rollout=replace(config.rollout, stop_token_ids=stop_tokens.stop_token_ids))
    vocabulary = Vocabulary.of(tokenizer, num_rows, "MODEL")
    data = PromptDataset(
        config.data.val,
        tokenizer,
        config.data,
        environment=config.environment,
        tools_of=partial(tools_of, config.environment),
        vocabulary=vocabulary,
        images=images,
    )
    check_askers(config, tokenizer, vocabulary, [data], "MODEL")
    check_ground_truths(config.rewards, data, tokenizer)
    labelled = zip(path_labels(request.data), data.num_prompts_by_file, strict=True)
    return EvalInputs(
        config=config,
        checkpoint=checkpoint,
        adapter=adapter,
        tokenizer=tokenizer,
        data=data,
        labels=tuple(label for label, count in labelled for _ in range(count)),
        ks=tuple(sorted(set(request.ks))),
        out=request.out,
    )


def _find_model(request: EvalRequest) -> tuple[Config, Checkpoint | None, Path | None]:
    """Find what the request names: return a configuration with the model, and the checkpoint or the adapters (if any)
    with its weights.

    A checkpoint or run may be somebody else's: its configuration decides only what is data, unless it is trusted.
    """
    given = None if request.run_file is None else load_config(request.run_file)
    path = Path(local_model(str(request.model), "MODEL"))
    if (path / STATE_FILE).is_file():
        if request.adapter is not None:
            raise ConfigError(f"--adapter: {path} is a checkpoint, which has its own weights; leave it out")
        checkpoint = read_checkpoint(path)
        own = checkpoint.state.config
        # The checkpoint has the adapters with which they began, too.
        lora = own.actor.lora and replace(own.actor.lora, path=None)
        config = replace(given, model=own.model) if given else _trusted(own, request)
        return replace(config, actor=replace(config.actor, lora=lora)), checkpoint, None
    if (path / "config.json").is_file():
        hf_config = read_hf_config(path)
        # Weights run in float32 if they are stored so, otherwise in bfloat16.
        stored = hf_config.get("dtype", hf_config.get("torch_dtype"))
        config = given or Config(model=ModelConfig(dtype="float32" if stored == "float32" else "bfloat16"))
        return replace(config, model=replace(config.model, path=str(path))), None, request.adapter
    run = RunPaths(path)
    if (export := exported(run)) is not None and run.config.is_file():
        own = saved_config(run.saved_tree())
        config, adapter, model = given or _trusted(own, request), request.adapter, str(export)
        if export == run.export_adapter:
            if adapter is not None:
                raise ConfigError(f"--adapter: the run {path} has ended with adapters of its own; leave it out")
            adapter, model = export, local_model(own.model.path, "model.path")
        return replace(config, model=replace(config.model, path=model)), None, adapter
    raise ConfigError(
        f"{path}: not a model; expected a Hugging Face directory (with config.json), a run with an export, or a "
        f"checkpoint (RUN/checkpoints/step_N, with {STATE_FILE})"
    )


def _trusted(own: Config, request: EvalRequest) -> Config:
    """Return the configuration that was found beside a model, without the cluster that ended with its run. Raises
    ConfigError if it names what would run or be reached here, and the request does not trust it.
    """
    own = replace(own, cluster=replace(own.cluster, address=None, hosts=()))
    found = [f"{key}: {masked(value, key)!r}"[:_MAX_SETTING_CHARS] for key, value in needing_trust(own)]
    if found and not request.trust_config:
        raise ConfigError(
            f"{request.model}: its configuration names code, commands, services or rights of programs: "
            f"{'; '.join(found)}; add --trust-config if you trust its author, or give a run file of yours with --config"
        )
    return own


def _eval_config(config: Config, request: EvalRequest, *, with_trainer: bool) -> Config:
    """Return a run's configuration with the model, data and sampling of an evaluation."""
    config = replace(
        config,
        # Images are kept beside the answers, and not in the directory of the run that made the model.
        run=replace(config.run, seed=request.seed, dir=str(request.out) if config.data.image_key else config.run.dir),
        data=replace(config.data, train=(), val=tuple(map(str, request.data))),
        rollout=replace(
            config.rollout,
            source="vllm",
            num_samples=request.num_samples,
            temperature=request.temperature,
            max_response_tokens=(
                config.rollout.max_response_tokens
                if request.max_response_tokens is None
                else request.max_response_tokens
            ),
        ),
    )
    if with_trainer:
        return config
    # Engines alone, which read all weights, on devices of their own and as many nodes as they need.
    placement = config.placement
    nodes = placement.engines if placement.mode == "split" else NodesConfig(num_nodes=placement.trainer.num_nodes)
    return replace(
        config,
        actor=replace(config.actor, layout=LayoutConfig(), lora=None),
        placement=PlacementConfig(mode="split", engines=nodes),
    )


def _engine_model_rows(config: Config) -> int:
    """Check the files and sizes of a model that only vLLM reads, and return how many tokens its config says it has.

    megarl itself need not support the model's family.
    """
    path = Path(config.model.path)
    hf_config = read_hf_config(path)
    # Models that also see images have the language model's sizes in a section.
    hf_config = {**hf_config, **hf_config.get("text_config", {})}
    check_model(config, hf_config)
    for file in model_files(path):
        read_header(file)
    return int(hf_config.get("vocab_size") or sys.maxsize)
