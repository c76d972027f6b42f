"""Define the command `megarl doctor`."""

import argparse
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.host.exit_codes import EXIT_FAILED


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
