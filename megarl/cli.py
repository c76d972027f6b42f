"""Define the `megarl` command with its subcommands, those of entry points in the group `megarl.commands` included.

Exit codes are those of `megarl.host.exit_codes`.
"""

import argparse
import atexit
import gc
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from megarl.convert.cli import add_convert
from megarl.errors import ConfigError, UnknownKeyError, did_you_mean
from megarl.forecast.cli import add_plan
from megarl.host.activity import shown
from megarl.host.exit_codes import exit_on_errors
from megarl.host.paths import expand_arguments, looked_for_here
from megarl.host.streams import escape_unencodable, print_lines, use_utf8_mode
from megarl.host.user_code import search_here_last
from megarl.launch.cli import add_slurm
from megarl.run.bisect import add_bisect
from megarl.run.evaluation.cli import add_evaluation
from megarl.run.gradients import add_compare_gradients
from megarl.run.resume_option import ResumeOption
from megarl.run.views import add_check_plugin, add_doctor, add_views

TRAININGS = {
    "train": "train a policy by reinforcement learning",
    "sft": "train a policy on chats and demonstrations",
    "train-reward": "train a reward model on preference pairs",
    "train-preference": "train a policy on preference pairs (DPO, IPO, KTO, ORPO)",
}

# Names of commands in other trainers → what does the same here.
ELSEWHERE = {
    "dpo": "train-preference",
    "evaluate": "eval",
    "export": "convert mcore-to-hf",
    "generate": "eval",
    "grpo": "train",
    "launch": "slurm submit",
    "merge": "convert merge",
    "ppo": "train",
    "resume": "train FILE --resume",
    "rl": "train",
    "rm": "train-reward",
    "submit": "slurm submit",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of a command line; an error ends the process with the exit code of its type."""
    if argv is None:
        use_utf8_mode()
        search_here_last()
    escape_unencodable()
    arguments = parse(argv)
    if argv is None and getattr(arguments, "dry_run", False):
        # The cyclic collector would take a third of the time, half of that at the exit, for imported modules alone.
        gc.disable()
        atexit.register(gc.freeze)
    with exit_on_errors(), looked_for_here(arguments):
        try:
            arguments.run(expand_arguments(arguments))
        except UnknownKeyError as error:
            from megarl.migrate.aliases import answered

            raise answered(error) from None


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # `init --data FILE` would name a data source.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        super().error(re.sub("ignored explicit argument (.*)", r"takes no value \1; leave it out", message))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; a wrong one ends the process with exit code 2."""
    parser: argparse.ArgumentParser = _Parser(prog="megarl", description="Reinforcement learning for language models.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_init, _add_trainings, add_evaluation, add_plan):
        add(commands)
    add_convert(commands)
    peer = commands.add_parser("convert-config", help="write a run file from that of verl, OpenRLHF or LUFFY")
    peer.add_argument("file", type=Path, help="a shell script that starts training, or a YAML file")
    peer.add_argument("given", nargs="*", metavar="NAME=VALUE", help="what a script is run with: variables, arguments")
    peer.add_argument("--command", type=int, dest="which", metavar="N", help="which of a script's training commands")
    peer.add_argument("--out", type=Path, metavar="RUN.yaml", help="run file to write; default: print it")
    peer.add_argument("--run-script", action="store_true", help="without a sandbox, run the script with stubs outside")
    peer.set_defaults(run=_convert_config)
    option = commands.add_parser("explain-option", help="say what an option of verl, OpenRLHF, TRL and others is here")
    option.add_argument("option", help="such as verl:actor.optim.lr")
    option.set_defaults(run=_explain_option)
    keys = commands.add_parser("config", help="find settings, files of configs/ and metrics by words of their meaning")
    keys.add_argument("--search", required=True, metavar="WORDS", help="what names or meanings have to contain")
    keys.set_defaults(run=_search)
    add_slurm(
        commands,
        parse,
        tuple(TRAININGS),
        lambda config: import_module("megarl.forecast.costs").planned_stop(
            import_module("megarl.plan.sizes").size_run(config)
        ),
    )
    for add in (_add_serve_reward, add_check_plugin, add_doctor, add_bisect, add_compare_gradients, add_views):
        add(commands)
    for point in entry_points(group="megarl.commands"):
        point.load()(commands)
    shell = commands.add_parser("completion", help='complete commands and settings: eval "$(megarl completion bash)"')
    shell.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell.set_defaults(run=_completion)
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser, commands)
    for name in (sys.argv[1:] if argv is None else argv)[:1]:
        if not name.startswith("-") and name not in commands.choices:
            here = ELSEWHERE.get(name)
            close = f"that is `megarl {here}` here; " if here else did_you_mean(name, commands.choices)
            parser.error(f"unknown command {name!r}; {close}expected one of: {', '.join(sorted(commands.choices))}")
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes no overrides after an option; they come back as unknown.
    if any(argument.startswith("-") for argument in rest) or (rest and "overrides" not in arguments):
        from megarl.migrate.aliases import unknown_options

        parser.error(unknown_options(rest, commands.choices[arguments.command]._option_string_actions))
    if rest:
        arguments.overrides += rest
    if getattr(arguments, "explain", None):
        arguments.run = _explain
    elif arguments.command in TRAININGS and arguments.config is None:
        parser.error(f"{arguments.command}: name a run file; `megarl init DIR` writes one")
    return arguments


def _add_trainings(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for name, text in TRAININGS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("config", type=Path, nargs="?", help="a run file, such as configs/run/sums-rl.yaml")
        command.add_argument("overrides", nargs="*", help="settings such as actor.optimizer.lr=1e-5")
        command.add_argument("--explain", metavar="KEY", help="print what a setting means, and its value in the file")
        existing = command.add_mutually_exclusive_group()
        existing.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
        existing.add_argument(*ResumeOption.VALUES, action=ResumeOption, nargs=0, help="continue its last checkpoint")
        command.set_defaults(run=_train_supervised)
        command.add_argument("--dry-run", action="store_true", help="check and print what a run would do")
        command.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
        if name == "train":
            command.set_defaults(run=_train)
            command.add_argument("--device-gib", type=float, help="with --dry-run: memory of one GPU")
            command.add_argument("--calibration", type=Path, metavar="FILE", help="with --dry-run: as of megarl plan")
            command.add_argument("--profile-steps", metavar="FIRST:LAST", help="write profiler traces of these steps")


def _add_init(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("init", help="write a first run file; asks for what the options do not say")
    command.add_argument("directory", type=Path, metavar="DIR", help="directory to write run.yaml to")
    command.add_argument("--model", metavar="MODEL", help="a Hugging Face directory or hub id")
    command.add_argument("--train", nargs="+", metavar="FILE", help="training prompts, parquet or JSONL")
    command.add_argument("--val", nargs="*", metavar="FILE", help="validation prompts")
    command.add_argument("--algo", metavar="NAME", help="a file of configs/algo")
    command.add_argument("--gpus", type=int, metavar="N", help="number of GPUs of 80 GiB; 0: CPU")
    command.add_argument("--prompt-key", metavar="COLUMN", help="column with the prompt; default: one of usual name")
    command.add_argument("--label-key", metavar="COLUMN", help="column with the right answer; default likewise")
    command.add_argument("--reward", metavar="FILE.py:NAME", help="a reward function of yours")
    command.add_argument("--data-source", metavar="NAME", help="of rows that name none, such as openai/gsm8k")
    command.set_defaults(run=_init)


def _add_serve_reward(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("serve-reward", help="answer reward requests of runs over HTTP, by rule")
    command.add_argument("overrides", nargs="*", help="settings such as rewards.verifier.workers=8")
    command.add_argument("--config", type=Path, help="a run file; its section rewards counts")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; other machines must send a key")
    command.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one")
    command.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key that clients send")
    command.add_argument("--max-rows", type=int, default=4096, metavar="N", help="rows in work; more are refused (503)")
    command.add_argument("--data-source", metavar="NAME", help="of requests that name none")
    command.set_defaults(run=_serve_reward)


# Heavy imports wait until the command is known, so that `megarl --help` and errors answer at once. The environment
# is set before the imports that read it.


def _train(arguments: argparse.Namespace) -> None:
    from megarl.config import load_config
    from megarl.run.first_checks import check_plan, check_start

    overrides = list(arguments.overrides)
    if (steps := arguments.profile_steps) is not None:
        first, colon, last = steps.partition(":")
        if not (colon and first.isdigit() and last.isdigit()):
            raise ConfigError(f"--profile-steps: got {steps!r}, expected FIRST:LAST, such as 3:5")
        overrides.append(f"logging.profile_steps=[{first}, {last}]")
    config = load_config(arguments.config, overrides)
    if arguments.dry_run:
        from megarl.config.target import checked_for, named_target

        with checked_for(named_target(config.cluster.target, gpus=None if arguments.device_gib is None else True)):
            warnings = check_plan(config, "train", overwrite=arguments.overwrite, resumes=bool(arguments.resume))
            from megarl.forecast.calibrate import calibrate
            from megarl.forecast.costs import PUBLISHED, step_cost
            from megarl.plan.build import print_plan

            constants = calibrate(arguments.calibration) if arguments.calibration else PUBLISHED
            print_plan(
                config,
                device_gib=arguments.device_gib,
                as_json=arguments.json,
                warnings=warnings,
                forecast=lambda run: step_cost(run, constants=constants).seconds,
            )
        return
    if arguments.json or arguments.device_gib is not None or arguments.calibration is not None:
        raise ConfigError("--json, --device-gib and --calibration: go with --dry-run; add it, or remove them")
    with shown():
        check_start(config, "train", overwrite=arguments.overwrite, resumes=arguments.resume is not None)
        from megarl.run.start import train

        train(config, overwrite=arguments.overwrite, resume=arguments.resume)


def _train_supervised(arguments: argparse.Namespace) -> None:
    from megarl.config import load_config
    from megarl.run.first_checks import check_plan, check_start

    config = load_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from megarl.config.target import checked_for, named_target
        from megarl.host.device.platform import apply_environment

        # Data are read by libraries for which this machine counts.
        apply_environment()
        with checked_for(named_target(config.cluster.target)):
            command, resumes = arguments.command, bool(arguments.resume)
            warnings = check_plan(config, command, overwrite=arguments.overwrite, resumes=resumes)
            from megarl.plan.build import print_supervised_plan

            print_supervised_plan(command, config, as_json=arguments.json, warnings=warnings)
        return
    if arguments.json:
        raise ConfigError("--json: goes with --dry-run; add it, or remove this")
    with shown():
        check_start(config, arguments.command, overwrite=arguments.overwrite, resumes=arguments.resume is not None)
        from megarl.run.start import train_supervised

        train_supervised(arguments.command, config, overwrite=arguments.overwrite, resume=arguments.resume)


def _explain(arguments: argparse.Namespace) -> None:
    from megarl.config import load_config
    from megarl.config.explain import explain

    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    print_lines(*explain(arguments.explain, config).split("\n"))


def _search(arguments: argparse.Namespace) -> None:
    from megarl.config.explain import search

    print_lines(*search(arguments.search))


def _explain_option(arguments: argparse.Namespace) -> None:
    from megarl.migrate.aliases import explain_option

    print_lines(*explain_option(arguments.option))


def _init(arguments: argparse.Namespace) -> None:
    from megarl.plan.init import ask_missing, dry_run, init_run
    from megarl.run.first_checks import check_prompts

    options = ("model", "train", "val", "algo", "gpus", "prompt_key", "label_key", "reward", "data_source")
    request = ask_missing(arguments.directory, {name: getattr(arguments, name) for name in options})
    file = init_run(request, check_prompts)
    print_lines(f"wrote {file}; next: {dry_run(file, request.gpus)}")


def _convert_config(arguments: argparse.Namespace) -> None:
    from megarl.migrate.convert_config import convert_config

    convert_config(arguments.file, arguments.out, arguments.given, arguments.which, run_anyway=arguments.run_script)


def _serve_reward(arguments: argparse.Namespace) -> None:
    from megarl.config.check import check_serve_reward
    from megarl.config.load import load_config, with_overrides
    from megarl.config.schema import Config
    from megarl.rewards.routes import check_sources
    from megarl.rewards.serve import ServeOptions, serve_rewards

    overrides = arguments.overrides
    config = load_config(arguments.config, overrides) if arguments.config else with_overrides(Config(), overrides)
    check_serve_reward(config)
    options = ServeOptions(**{each.name: getattr(arguments, each.name) for each in fields(ServeOptions)})
    check_sources(config.rewards, [] if options.data_source is None else [options.data_source])
    serve_rewards(config.rewards, options)


def _completion(arguments: argparse.Namespace) -> None:
    import argcomplete

    print(argcomplete.shellcode(["megarl"], shell=arguments.shell))


def _complete(parser: argparse.ArgumentParser, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Answer the shell that asks, by the environment, how a command line may go on; this ends the process."""
    import argcomplete

    from megarl.config.explain import complete_key, complete_override

    completers = {"overrides": complete_override, "explain": complete_key}
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in completers:
                action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    main()
