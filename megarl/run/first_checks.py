"""Find mistakes in a command line that need no cluster, before slow libraries are imported."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

from megarl.algos.build import algorithm_of
from megarl.algos.preference import preference_objective
from megarl.config.check import TRAINING_CHECKS
from megarl.config.model_names import models_of
from megarl.config.schema import Config, DataConfig
from megarl.config.setting import addresses_of
from megarl.config.target import target_in_words
from megarl.data.files import RowFiles
from megarl.data.prompts import read_prompt
from megarl.data.records import (
    NAME_COLUMNS,
    PREFERENCE_SIDES,
    demonstration_columns,
    parse_demonstration,
    parse_preference,
    preference_columns,
    prompt_columns,
    required_columns,
)
from megarl.data.sampler import prompt_sampler, require_batch, train_files
from megarl.data.tokenizer_files import require_tokenizer
from megarl.environments.base import type_of
from megarl.errors import ConfigError
from megarl.host.child_environment import proxy_of, require_assertions
from megarl.host.directory_lock import DirectoryLock
from megarl.host.janitor import HOSTED_RUN_VARIABLE
from megarl.host.masking import masked_text
from megarl.host.reach import unreached
from megarl.host.streams import print_lines
from megarl.host.writing import free_bytes, room
from megarl.record.checkpoints import Command
from megarl.record.inputs import names_file, texts_of
from megarl.record.metrics import RunPaths
from megarl.record.trackers import require_trackers
from megarl.rewards.custom.signatures import look_for
from megarl.rewards.routes import check_sources
from megarl.run.resume import check_resumed
from megarl.train.inputs import check_image_engines, open_model
from megarl.train.rehearsal import rehearse, rehearse_episodes
from megarl.types import Prompt
from megarl.weights.families import read_model_spec
from megarl.weights.hub import local_model

if TYPE_CHECKING:
    from megarl.data.images import DataImages, RowsImages

# The sections with addresses of programs that a run asks; supervised ones only use a cluster.
_ASKED = ("cluster", "rewards", "teacher", "teachers")
# CPU seconds for each list of files: some 40,000 rows. The run itself looks at all.
_ROWS_S = 0.5


def check_plan(config: Config, command: Command, *, overwrite: bool, resumes: bool) -> list[str]:
    """Raise ConfigError or DataError for what a dry run would find wrong with settings, models and data, where these
    are there, and with this machine, if the run is planned for it; return warnings.
    """
    _check_settings(config, command)
    paths, warnings = RunPaths.of(config.run), list[str]()
    if not target_in_words():
        # Another place leaves that of a run which starts alone.
        with DirectoryLock(paths.root, command, place=paths.root / f"plan-{os.getpid()}"):
            _check_machine(config, command, paths.root)
        mistakes, missing = unreached_servers(config, _ASKED if command == "train" else ("cluster",))
        warnings += [*(f"{mistake}; until then a start is refused" for mistake in mistakes), *missing]
    if resumes:
        warnings += [line.removeprefix("warning: ") for line in check_resumed(config, command)]
    elif not overwrite and paths.hold_a_run():
        warnings.append(
            f"{paths.root} already holds a run, and a start would be refused without --resume or --overwrite"
        )
    if config.model.config_path is None:
        warnings += _check_models(config, command, "*.safetensors")
    if command == "train":
        _look_for_functions(config, if_there=True)
    if all(Path(file).exists() for files in _data(config, command) for file in files):
        _check_data(config, command)
    rehearse(config, afresh=True)
    return warnings


def check_start(config: Config, command: Command, *, overwrite: bool, resumes: bool) -> None:
    """Raise ConfigError or DataError if a run cannot start: its settings, its directory, a package, a file or code of
    users.

    The run reads all of that again, and more.
    """
    _check_settings(config, command)
    paths = RunPaths.of(config.run)
    with DirectoryLock(paths.root, command):
        pass
    if resumes:
        print_lines(*check_resumed(config, command))
    elif not overwrite:
        paths.require_unused()
    _check_machine(config, command, paths.root)
    mistakes, missing = unreached_servers(config, _ASKED if command == "train" else ("cluster",))
    if mistakes:
        raise ConfigError(mistakes[0])
    print_lines(*(f"warning: {warning}" for warning in missing))
    # A resumed run pins the commits of models that it began with.
    if not resumes:
        print_lines(*(f"warning: {warning}" for warning in _check_models(config, command, "*")))
    if command == "train":
        _look_for_functions(config)
    _check_data(config, command)
    rehearse(config)


def _check_settings(config: Config, command: str) -> None:
    """Check settings for a command; those of plugins, only after these have been tried in a process of their own."""
    require_assertions()
    for key, text in texts_of(config):
        if "://" in text and (key == "run.dir" or names_file(key)):
            raise ConfigError(
                f"{key}: got {masked_text(text)!r}, expected a path: runs read and write files of this host alone; "
                "copy them there, or mount that storage"
            )
    if not config.algo.plugins:
        TRAINING_CHECKS[command](config)
        if command == "train":
            algorithm_of(config)
            check_sources(config.rewards, [], loads=False)
            for name in (*config.environment.entries, *filter(None, [config.environment.default])):
                type_of(config.environment, name)
        if command == "train-preference":
            preference_objective(config.train_preference)


def _look_for_functions(config: Config, *, if_there: bool = False) -> None:
    for function in config.rewards.custom.all_functions().values():
        if not if_there or Path(function.path).exists():
            look_for(Path(function.path), function.name)


def _check_models(config: Config, command: str, files: str) -> list[str]:
    """Check models, of the policy's also weights and tokenizer if its directory has such files; return warnings."""
    for key, name in models_of(config).items():
        read_model_spec(Path(local_model(name, key, weights=False)), key)
    if any(Path(config.model.path).glob(files)):
        # The training of a reward model checks it as one.
        if command != "train-reward":
            open_model(config, for_sft=command == "sft")
        if command == "train":
            check_image_engines(config)
        require_tokenizer(config.model.path, "model.path")
    return list(adapter_warnings(config))


def adapter_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose given adapters were trained on a base of another name."""
    for key in ("actor", "critic", "reward_model"):
        section = getattr(config, key)
        if section.lora is not None and section.lora.path is not None:
            from megarl.weights.peft_files import read_peft

            model = config.model.path if key == "actor" else section.model_path or config.model.path
            spec = read_model_spec(Path(local_model(model, key, weights=False)))
            if named := read_peft(Path(section.lora.path), spec).other_base(spec):
                yield f"{key}.lora.path: the adapters were trained on {named}, by adapter_config.json; is that {model}?"


def _data(config: Config, command: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the files of training and of validation."""
    data = config.data if command == "train" else getattr(config, command.replace("-", "_"))
    return train_files(data.train), data.val


def _check_data(config: Config, command: str) -> None:
    """Check the columns of data files, the first rows of each list of them, and that there are enough for a batch."""
    training, held_out = _data(config, command)
    if command == "train":
        for files in filter(None, (training, held_out)):
            rows = check_prompts(config, files)
            if files is training:
                size, seed, form = config.trainer.prompts_per_step, config.run.seed, config.data
                prompt_sampler(form.train, rows.sizes, batch_size=size, seed=seed, shuffle=form.shuffle)
        return
    form, sft, section, images = config.data, config.sft, command.replace("-", "_"), _images(config)
    for files in filter(None, (training, held_out)):
        if command == "sft":
            rows = RowFiles(files, columns=demonstration_columns(form, sft), unread=())
        else:
            rows = RowFiles(files, columns=preference_columns(form), required=PREFERENCE_SIDES, unread=())
        for where, row, shown in _first(rows, form, images):
            if command == "sft":
                parse_demonstration(row, where, form, sft, shown)
            else:
                parse_preference(row, where, form, shown)
        # A chat may become a row for each of its turns.
        if files is training and (command != "sft" or sft.train_on != "each"):
            require_batch(len(rows), getattr(config, section).batch_size, f"{section}.batch_size")


def check_prompts(config: Config, files: Sequence[str] = ()) -> RowFiles:
    """Check the form of the first prompts of files, that something judges their data sources, and their environments,
    by an episode where it is allowed.

    files: by default those to train on. Later checks of all rows, and of their length, need a tokenizer.
    """
    columns, sources = (*prompt_columns(config.data), config.environment.key), set[str]()
    firsts = dict[str, Prompt]()
    files = files or train_files(config.data.train)
    rows = RowFiles(files, columns=columns, required=required_columns(config.data), remedy=NAME_COLUMNS, unread=())
    images = _images(config)
    with nullcontext() if images is None else images.kept_apart():
        for where, row, shown in _first(rows, config.data, images):
            record, environment = read_prompt(row, where, config.data, config.environment, shown)
            try:
                if environment and environment not in firsts:
                    type_of(config.environment, environment)
                    firsts[environment] = Prompt(
                        uid=where,
                        token_ids=(),
                        data_source=record.data_source,
                        ground_truth=record.ground_truth,
                        extra_info=record.extra_info,
                        messages=record.messages,
                        environment=environment,
                    )
                if record.data_source not in sources:
                    check_sources(config.rewards, [record.data_source], loads=False)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            sources.add(record.data_source)
        rehearse_episodes(config, firsts.values(), firsts, images=images)
    return rows


def _images(config: Config) -> "DataImages | None":
    """Return the images of the data; None: rows are texts alone, or nothing here opens images."""
    if config.data.image_key is None or find_spec("PIL") is None:
        return None
    from megarl.data.images import DataImages

    return DataImages.unexpanded(config.model.path, config.data)


def _first(
    rows: RowFiles, form: DataConfig, images: "DataImages | None"
) -> Iterator[tuple[str, Mapping[str, object], "RowsImages | None"]]:
    """Yield the first rows with their places and their images; none if nothing here opens these."""
    until = process_time() + _ROWS_S
    for i, row in enumerate(rows if form.image_key is None or images is not None else ()):
        yield rows.where(i), row, None if images is None else images.of_row(rows, i, row)
        if process_time() > until:
            break


def unreached_servers(config: Config, sections: Collection[str]) -> tuple[list[str], list[str]]:
    """Connect to the addresses of other programs that some sections name; return mistakes, of settings that lead to
    nobody, and warnings about servers that are not there while others of the same setting are.

    Judges without a trial are left out. Judges behind a proxy count as there if the proxy is.
    """
    judges = {f"rewards.judges.{name}.endpoint.urls": judge for name, judge in config.rewards.judges.items()}
    skipped = {key for key, judge in judges.items() if not judge.dry_run}
    # A job starts Ray and its driver side by side.
    skipped |= {"cluster.address"} if HOSTED_RUN_VARIABLE in os.environ else set()
    mistakes, warnings = list[str](), list[str]()
    for key, addresses in addresses_of(config).items():
        if key in skipped or key.partition(".")[0] not in sections:
            continue
        behind = key in judges and judges[key].endpoint.use_proxy
        asked = {(behind and proxy_of(address, key)) or address: address for address in addresses}
        missing = unreached(list(asked))
        told = ", ".join(f"{address} ({why})" for address, why in missing.items())
        if len(missing) == len(asked):
            remedy = f"start that program first, or correct {key}"
            if any(door != address for door, address in asked.items()):
                remedy = "correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, which name it, or name hosts in NO_PROXY"
            mistakes.append(f"{key}: nobody accepts connections at {told}; {remedy}")
        elif missing:
            warnings.append(f"{key}: nobody accepts connections at {told}; the others get all requests")
    return mistakes, warnings


def _check_machine(config: Config, command: Command, root: Path) -> None:
    """Raise ConfigError for a tracker's package or a key that is missing, or a disk without room for the export."""
    require_trackers(config.logging)
    asked = [f"rewards.judges.{name}.endpoint" for name in config.rewards.asked_judges()]
    asked += ["rewards.remote", "rewards.hybrid"] if config.rewards.uses("remote") else []
    for key, name in texts_of(config) if command == "train" else ():
        if key.endswith(".api_key_env") and key.startswith(("teacher", *asked)) and not os.environ.get(name):
            raise ConfigError(f"{key}: {name} is not set; export the key")
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    if config.actor.lora is None and config.trainer.total_steps and weights > free_bytes(root):
        raise ConfigError(
            f"run.dir: {room(root)} at {root}, and the trained model alone takes {weights / 2**20:,.0f} MiB; free "
            "space there, or choose another run.dir"
        )
