"""Define the commands that look at a run's directory (status, report, learning-curve, explain-step, trace), at this
machine (doctor) and at a plugin.
"""

import argparse
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.host.exit_codes import EXIT_FAILED
from megarl.host.streams import print_lines


def add_views(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands that read a run's directory, whether the run goes on or has ended."""
    status = commands.add_parser("status", help="say what a run is doing, from any host that sees its directory")
    status.add_argument("run_dir", type=Path, help="the run's directory")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument("--watch", action="store_true", help="renew it until the run ends, with curves")
    status.set_defaults(run=_status)
    report = commands.add_parser("report", help="write a run's report as HTML and PNG")
    report.add_argument("run_dir", type=Path, help="the run's directory")
    report.add_argument("others", type=Path, nargs="*", help="runs to compare it with")
    report.set_defaults(run=_report)
    curve = commands.add_parser("learning-curve", help="say whether runs would gain from more samples: go on, or stop")
    curve.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs with validations")
    curve.add_argument("--greedy", action="store_true", help="fit the scores of greedy answers")
    curve.add_argument("--until", type=int, metavar="STEP", help="fit the validations up to this step")
    curve.add_argument("--min-gain", type=float, default=0.01, metavar="X", help="what twice the samples have to gain")
    curve.add_argument("--out", type=Path, metavar="FILE", help="picture; default: learning_curve.png in the first run")
    curve.set_defaults(run=_learning_curve)
    step = commands.add_parser(
        "explain-step", help="say what a step learned from, what was taken away, what limited it"
    )
    step.add_argument("run_dir", type=Path, metavar="RUN", help="the run's directory")
    step.add_argument("step", type=int, metavar="N", help="the training step")
    step.add_argument("--out", type=Path, metavar="FILE", help="picture to write; default: RUN/step_N.png")
    step.set_defaults(run=_explain_step)
    trace = commands.add_parser("trace", help="write when trainer and engines worked, for ui.perfetto.dev")
    trace.add_argument("run_dir", type=Path, help="the run's directory")
    trace.add_argument("--out", type=Path, metavar="FILE", help="trace to write; default: RUN/trace.json")
    trace.set_defaults(run=_trace)


def _status(arguments: argparse.Namespace) -> None:
    if arguments.watch:
        from megarl.launch.watch import watch_status

        return watch_status(arguments.run_dir)
    from megarl.launch.status import print_status

    print_status(arguments.run_dir, as_json=arguments.json)


def _report(arguments: argparse.Namespace) -> None:
    from megarl.report import write_report

    paths = write_report(arguments.run_dir, arguments.others)
    print_lines(f"wrote {paths.html}", f"wrote {paths.png}")


def _learning_curve(arguments: argparse.Namespace) -> None:
    from megarl.report.figures import write_learning_curves
    from megarl.report.run import load_runs

    out = arguments.out or arguments.runs[0] / "learning_curve.png"
    options = {name: getattr(arguments, name) for name in ("greedy", "until", "min_gain")}
    print_lines(*write_learning_curves(load_runs(arguments.runs), out, **options), f"wrote {out}")


def _explain_step(arguments: argparse.Namespace) -> None:
    from megarl.record.metrics import RunPaths
    from megarl.report.run import load_runs
    from megarl.report.step import explain_step, to_text
    from megarl.report.step_figure import write_step_png

    (run,) = load_runs([arguments.run_dir])
    explained = explain_step(run, RunPaths(arguments.run_dir), arguments.step)
    out = arguments.out or arguments.run_dir / f"step_{arguments.step}.png"
    write_step_png(explained, out)
    print_lines(*to_text(explained), f"wrote {out}")


def _trace(arguments: argparse.Namespace) -> None:
    from megarl.record.metrics import RunPaths
    from megarl.record.timeline import write_trace

    out = arguments.out or RunPaths(arguments.run_dir).trace
    write_trace(RunPaths(arguments.run_dir).timeline, out)
    print_lines(f"wrote {out}; open it on ui.perfetto.dev")


def add_check_plugin(commands: Any) -> None:
    """Add the command `check-plugin` to the commands of a parser."""
    command = commands.add_parser("check-plugin", help="try losses, rewards, environments and agents of one's own")
    command.add_argument("file", metavar="FILE", help="a Python file, or what of it to try: FILE.py:NAME")
    command.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="time limit; default: 60")
    command.set_defaults(run=_check_plugin)


def _check_plugin(arguments: argparse.Namespace) -> None:
    from megarl.config.load import with_overrides
    from megarl.config.schema import Config
    from megarl.train.rehearsal import Trial, try_out

    file, _, name = arguments.file.partition(".py:")
    file = f"{file}.py" if name else file
    if not file.endswith(".py"):
        raise ConfigError(f"megarl check-plugin: got {arguments.file}, expected a Python file, its name ending in .py")
    # It may be for a run that reads images.
    chosen = ["data.image_key=images", f"algo.plugins=[{file!r}]", f"run.rehearsal_s={arguments.limit_s}"]
    config = with_overrides(Config(), chosen)
    found = try_out(Trial(config=config, every=not name, file=file, name=name))
    # A mistake begins with the file, and names the part.
    mistaken = [
        about for about in found.tried if any(about.rpartition(": ")[2] in mistake for mistake in found.mistakes)
    ]
    lines = [f"{about}: well" for about in found.tried[1:] if about not in mistaken]
    lines += [f"warning: {warning}" for warning in found.warnings]
    for line in (*lines, *(f"mistake: {mistake}" for mistake in found.mistakes)):
        print_lines(line)
    if found.mistakes:
        raise SystemExit(EXIT_FAILED)


def add_doctor(commands: Any) -> None:
    """Add the command `doctor` to the commands of a parser."""
    doctor = commands.add_parser("doctor", help="check whether this machine can run megarl")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--security", action="store_true", help="check instead who else can read, steer or join runs")
    doctor.add_argument("run_dir", nargs="?", type=Path, metavar="RUN", help="with --security, check this run as well")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    from megarl.doctor.render import print_diagnosis, print_security

    if arguments.security:
        from megarl.weights.dist_index import require_plain_data

        is_well = print_security(arguments.run_dir, require_plain_data, as_json=arguments.json)
    elif arguments.run_dir is not None:
        raise ConfigError(f"megarl doctor: got {arguments.run_dir}; a run is only checked with --security")
    else:
        from megarl.parallel.backend import check_megatron

        is_well = print_diagnosis(check_megatron, as_json=arguments.json)
    if not is_well:
        raise SystemExit(EXIT_FAILED)
