"""Write a first run file: `megarl init DIR` asks for model, data, algorithm and GPUs, or takes them as options."""

import itertools
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import PACKAGED, SCHEMA, load_config
from megarl.config.schema import Config
from megarl.data.files import columns_of
from megarl.errors import ConfigError, DataError
from megarl.host.device.accelerators import nvidia_devices
from megarl.host.streams import print_lines
from megarl.host.unicode import visible
from megarl.host.writing import replacing
from megarl.weights.families import read_model_spec
from megarl.weights.hub import local_model

GPUS_PER_NODE = 8
# Names by which data sets call the columns of prompts and of right answers, if not as verl does.
PROMPT_NAMES = ("question", "problem", "messages", "instruction", "query", "input")
LABEL_NAMES = ("answer", "ground_truth", "solution", "label", "target", "final_answer")
_TEMPLATE = """\
# yaml-language-server: $schema={schema}
# Written by `megarl init`. What the run does and needs: `{dry_run}`.
# What a key means: `megarl train --explain KEY`. Every key may also be given on the command line, as key=value.
use: {{algo: {algo}}}        # a file of configs/algo; the run may change any of its settings
run: {{name: {name}, dir: {runs}}}
model:
  path: {model}        # a Hugging Face directory or hub id
  dtype: {dtype}
data:                  # parquet or JSONL; docs/data.md says which columns are read
  train: {train}
  val: {val}
{columns}  max_prompt_tokens: {prompt}
  on_long_prompt: drop
rollout:
  num_samples: 8       # answers to each prompt, which are compared with one another
  max_response_tokens: {response}
{engine}trainer:
  total_steps: 200
  prompts_per_step: {prompts}
  mini_batch_prompts: {mini}   # prompts of an optimizer step
validation: {{every_steps: 20}}
actor:
{actor}  optimizer: {{lr: 1.0e-6, warmup_steps: 10}}
"""
_GPU_ACTOR = """\
  layout: {{tp: {tp}, pp: {pp}, dp: {dp}, sequence_parallel: {sp}}}   # of {gpus} GPUs; the first that fits 80 GiB
  micro_batch_tokens: 16384
  recompute: auto      # of activations, in backward: the least that fits
"""
_GPU_ENGINE = "  engine: {{num_engines: {num}, tp: {tp}}}\n"
_GPU_PLACEMENT = """\
placement:             # engines use the trainer's devices, and each leaves them to the other
  mode: colocated
  offload: true
  trainer: {{num_nodes: {nodes}, devices_per_node: {per_node}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """The answers from which a first run file is written.

    gpus: 0 for a run on CPU cores. prompt_key, label_key: columns of the prompts; None: those with a usual name.
    reward: `FILE.py:NAME` of a function of one's own, which then also judges rows that name no data source.
    data_source: that of rows that name none.
    """

    directory: Path
    model: str
    train: Sequence[str]
    val: Sequence[str]
    algo: str
    gpus: int
    prompt_key: str | None = None
    label_key: str | None = None
    reward: str | None = None
    data_source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A question on the terminal. `read` turns the answer into a value; while it raises, the question is repeated."""

    text: str
    default: str
    read: Callable[[str], Any]

    def ask(self) -> Any:
        while True:
            try:
                answer = input(f"{self.text} [{self.default}]: ").strip() or self.default
            except EOFError as error:
                raise ConfigError(f"megarl init: no answer to: {self.text}") from error
            try:
                return self.read("" if answer == "-" else answer)
            except (ConfigError, DataError) as error:
                print_lines(f"  {error}")


def ask_missing(directory: Path, given: Mapping[str, Any]) -> InitRequest:
    """Complete a request by asking on the terminal; without one, raise ConfigError, which names the missing options."""
    known = {name: value for name, value in given.items() if value is not None}
    gpus = "" if "gpus" in known else str(len(nvidia_devices()))
    questions = {
        "model": _Question(text="model (a Hugging Face directory or hub id)", default="Qwen/Qwen3-0.6B", read=_model),
        "train": _Question(text="training prompts (parquet or JSONL)", default="data/train.parquet", read=_train),
        "val": _Question(text="validation prompts (none: -)", default="data/val.parquet", read=_files),
        "algo": _Question(text="algorithm (a file of configs/algo)", default="grpo", read=_algorithm),
        "gpus": _Question(text="number of GPUs of 80 GiB (0: CPU)", default=gpus, read=_count),
    }
    missing = [name for name in questions if name not in known]
    if missing and not sys.stdin.isatty():
        raise ConfigError(
            f"megarl init: --{', --'.join(missing)}: not given, and there is no terminal to ask on; "
            "give what is missing (`--val` alone: no validation)"
        )
    for name in missing:
        known[name] = questions[name].ask()
    if missing:
        further = _about_data(known["train"])
        known |= {name: question.ask() for name, question in further.items() if name not in known}
    return InitRequest(directory=directory, **{**known, "gpus": _count(str(known["gpus"]))})


def _about_data(train: Sequence[str]) -> dict[str, _Question]:
    """Ask for the columns that verl names otherwise, and for a reward function."""
    columns = columns_of(Path(train[0]))
    there = f"there are: {', '.join(columns)}"

    def column(answer: str) -> str:
        if answer not in columns:
            raise ConfigError(f"no column {answer!r}; {there}")
        return answer

    questions = {}
    if "prompt" not in columns:
        default = _named(columns, PROMPT_NAMES) or columns[0]
        questions["prompt_key"] = _Question(text=f"column with the prompt ({there})", default=default, read=column)
    if "reward_model" not in columns:
        default, text = _named(columns, LABEL_NAMES) or columns[-1], f"column with the right answer ({there})"
        questions["label_key"] = _Question(text=text, default=default, read=column)
    text = "reward function of yours, FILE.py:NAME (none: -)"
    return {**questions, "reward": _Question(text=text, default="-", read=_function)}


def _named(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the one column that has one of these names; None if several have, or none."""
    found = [name for name in names if name in columns]
    return found[0] if len(found) == 1 else None


def _model(text: str) -> str:
    read_model_spec(local_model(text, "--model", weights=False), "--model")
    return text


def _files(text: str) -> list[str]:
    for name in text.split():
        columns_of(Path(name))
    return text.split()


def _train(text: str) -> list[str]:
    if not text:
        raise ConfigError("--train: a run needs prompts; name a file")
    return _files(text)


def _algorithm(text: str) -> str:
    algorithms = sorted(path.stem for path in (PACKAGED / "algo").glob("*.yaml"))
    if text not in algorithms:
        raise ConfigError(f"--algo: got {text!r}, expected one of {', '.join(algorithms)}")
    return text


def _count(text: str) -> int:
    if not text.isdigit() or (int(text) > GPUS_PER_NODE and int(text) % GPUS_PER_NODE):
        raise ConfigError(f"--gpus: got {text}, expected 0 to {GPUS_PER_NODE}, or a multiple of {GPUS_PER_NODE}")
    return int(text)


def _function(text: str) -> str | None:
    if text and not Path(text.partition(":")[0]).is_file():
        raise ConfigError(f"--reward: no file {text.partition(':')[0]}; write it first, or answer -")
    return text or None


def dry_run(file: Path, gpus: int) -> str:
    """Return the command that shows what the run of a file does and needs."""
    return f"megarl train {shlex.quote(str(file))} --dry-run" + (" --device-gib 80" if gpus else "")


def init_run(request: InitRequest, look: Callable[[Config], object] = lambda _: None) -> Path:
    """Write DIR/run.yaml with comments, after the checks of `--dry-run`; return its path.

    The layout is the one with the fewest devices per replica whose plan fits into 80 GiB per GPU. Nothing is written if
    this raises: ConfigError if the file exists, if no layout fits, or for what the checks refuse; DataError, which
    names the options that may help, for data that cannot be read or judged. look: a quick check of the data, which
    comes before anything else.
    """
    file = request.directory / "run.yaml"
    if file.exists():
        raise ConfigError(f"{file} exists; name another directory, or remove it")
    _algorithm(request.algo)
    positions = read_model_spec(local_model(request.model, "--model", weights=False), "--model").max_positions
    columns = columns_of(train) if (train := Path(request.train[0])).exists() else ("prompt", "reward_model")
    request = replace(
        request,
        prompt_key=request.prompt_key or (None if "prompt" in columns else _named(columns, PROMPT_NAMES)),
        label_key=request.label_key or (None if "reward_model" in columns else _named(columns, LABEL_NAMES)),
    )
    if request.reward and request.data_source is None and "data_source" not in columns:
        request = replace(request, data_source=request.directory.resolve().name)
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch) / "run.yaml"
        draft.write_text(_text(request, tp=1, pp=1, positions=positions), encoding="utf-8")
        if train.exists():
            _check_data(draft, request, look)
        text = _first_that_fits(request, draft, positions)
    request.directory.mkdir(parents=True, exist_ok=True)
    with replacing(file) as written:
        written.write_text(text, encoding="utf-8")
    return file


def _first_that_fits(request: InitRequest, draft: Path, positions: int) -> str:
    """Return the run file with the first layout that fits; `draft` is written over."""
    # With torch, for which mistakes in options need not wait.
    from megarl.plan.build import plan_run
    from megarl.plan.recompute import FILL, H100_BYTES

    refusals: list[ConfigError] = []
    # The sizes with fewer devices per replica first, tp before pp.
    sizes = itertools.product((1, 2, 4, 8), repeat=2) if request.gpus else [(1, 1)]
    fitting = [(tp, pp) for tp, pp in sizes if request.gpus % (tp * pp) == 0]
    for tp, pp in sorted(fitting, key=lambda each: (math.prod(each), each[1])):
        draft.write_text(text := _text(request, tp=tp, pp=pp, positions=positions), encoding="utf-8")
        try:
            plan = plan_run(load_config(draft), device_bytes=H100_BYTES if request.gpus else None, with_data=False)
        except ConfigError as error:
            refusals.append(error)
            continue
        peak = max(phase.total for device in plan.devices for phase in device.phases.values())
        if not request.gpus or peak <= FILL * H100_BYTES:
            _check_data(draft, request, plan_run)
            return text
    if refusals:
        raise refusals[0]
    raise ConfigError(
        f"--gpus: {request.gpus} GPUs of 80 GiB are too few for {request.model} under any layout that was tried; give "
        "more, or write a run file with context or expert parallelism by hand (configs/model has examples)"
    )


def _check_data(draft: Path, request: InitRequest, check: Callable[[Config], object]) -> None:
    try:
        check(load_config(draft))
    except (ConfigError, DataError) as error:
        given = {"--prompt-key": request.prompt_key, "--label-key": request.label_key}
        read = "".join(f" {option} {column}" for option, column in given.items() if column)
        raise DataError(
            f"{error}. Nothing was written{f' (with{read})' if read else ''}; say how to read and judge the data with "
            f"--prompt-key and --label-key (columns: {', '.join(columns_of(Path(request.train[0])))}), --data-source "
            "or --reward, or correct them"
        ) from error


def _scalar(text: object) -> str:
    """Return a text as YAML writes it, in quotes if it would mean something else without them."""
    return yaml.safe_dump([str(text)], default_flow_style=True, width=math.inf, allow_unicode=True).strip()[1:-1]


def _text(request: InitRequest, *, tp: int, pp: int, positions: int) -> str:
    gpus = request.gpus
    # A quarter of a short context for the question.
    prompt = min(1024, positions // 4)
    per_node = min(gpus, GPUS_PER_NODE)
    actor = engine = placement = ""
    if gpus:
        actor = _GPU_ACTOR.format(tp=tp, pp=pp, dp=gpus // (tp * pp), sp=str(tp > 1).lower(), gpus=gpus)
        engine = _GPU_ENGINE.format(num=gpus // tp, tp=tp)
        placement = _GPU_PLACEMENT.format(nodes=max(1, gpus // GPUS_PER_NODE), per_node=per_node)
    else:
        engine = "  engine: {kv_cache_mib: 512, max_num_seqs: 64}\n"
    name = _scalar(request.directory.resolve().name)
    keys = {"prompt_key": request.prompt_key, "label_key": request.label_key}
    columns = "".join(f"  {key}: {_scalar(column)}\n" for key, column in keys.items() if column)
    if request.data_source:
        columns += f"  default_source: {_scalar(request.data_source)}   # of rows that name none\n"
    body = _TEMPLATE.format(
        schema=SCHEMA,
        dry_run=visible(dry_run(request.directory / "run.yaml", gpus)),
        algo=_scalar(request.algo),
        name=name,
        runs=_scalar(request.directory / "runs"),
        model=_scalar(request.model),
        dtype="bfloat16" if gpus else "float32",
        train=f"[{', '.join(map(_scalar, request.train))}]",
        val=f"[{', '.join(map(_scalar, request.val))}]",
        columns=columns,
        prompt=prompt,
        response=min(4096 if gpus else 256, positions - prompt),
        engine=engine,
        prompts=256 if gpus else 16,
        mini=64 if gpus else 16,
        actor=actor or "  micro_batch_tokens: 4096\n",
    )
    reward = ""
    if request.reward:
        path, _, function = request.reward.partition(":")
        custom = f"{{path: {_scalar(path)}, name: {_scalar(function or 'reward_func')}}}"
        reward = f"rewards:\n  custom: {custom}   # docs/rewards.md\n"
    return body + placement + reward
