"""Write docs/migrating.md, a table per framework from its option names to the keys here: `python -m
megarl.migrate.document`.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from megarl.host.streams import print_lines
from megarl.migrate.aliases import ABSENT, ALIASES, RENAMED, RENAMED_AS_HERE, Alias

PAGE = Path("docs/migrating.md")
COMMAND = "python -m megarl.migrate.document"
_HEADER = f"""# From verl, OpenRLHF or LUFFY

Written by `{COMMAND}` from the tables `megarl/migrate/peers/*.yaml`; edit those instead.

    megarl convert-config train.sh --out configs/run/mine.yaml
    megarl train configs/run/mine.yaml --dry-run --device-gib 80

The first command reads a script with `python3 -m verl.trainer.main_ppo a.b=c …`, `python3 -m
openrlhf.cli.train_ppo_ray --flag value …` or LUFFY's `main_mix_ppo`, or a YAML file, and writes a run file. An unknown
key in a run file or on the command line is answered from the same tables.

Bash (4.4 or newer) runs the script, without arguments and with none of its variables set before, in a sandbox where a
stub stands for every program. Where the machine offers no such sandbox (user namespaces), `--run-script` runs it in an
empty environment without one: what it redirects into files is then written.

- `megarl convert-config train.sh SMOKE=1 big` stands for `SMOKE=1 bash train.sh big`. `--command 2` takes the second of
  several commands that start training. Files that the script sources are read.
- The converter does not guess what only the machine knows: the output of a command (`$(nproc)`), a file, a variable of
  Slurm, or a variable without a default that the script never sets. Options that depend on these are left out: the
  script runs for both outcomes of such a condition, and an option on which all runs agree is carried over.
- Values are read by Hydra's grammar: `on` and `0123` are texts. Options that `~` removes, that Hydra refuses or takes
  for a sweep are left to you. An option on a line of its own, cut off by a comment or a missing backslash, is named.
- Scripts of slime and vime are not supported.
- The run file's comments and the terminal list every option that is left out, with line and reason.

The defaults of verl 0.6 and 0.9, OpenRLHF before 0.11, and LUFFY are written out. Values are converted:

- Warm-up counts training steps in verl and LUFFY, and optimizer steps here.
- OpenRLHF's `train_batch_size` counts rows; mini-batches here count prompts.
- Micro-batches of so many rows become as many tokens as these rows have at full length. Tokens per device become tokens
  per data-parallel rank.
- `actor.layout.dp` and the number of engines follow from the number of devices. FSDP and ZeRO-3 shard parameters over
  all devices; Megatron does so by `actor.layout.tp` and `pp`, which you choose if the plan does not fit.
- Two options that are one here, such as the switch and the coefficient of a KL penalty, are put together.

Models may be [ids on the hub](models.md#where-models-come-from). Data must be files: download first what a script takes
from a hub ([published files](data.md#published-files)). A custom reward function of verl or OpenRLHF runs as it is
(`rewards.custom`).
"""
_FRAMEWORKS: Mapping[str, str] = {
    "verl": "`+` before a name, and its first sections, may be left out where that is unambiguous.",
    "LUFFY": "In addition to verl's names.",
    "CPO": "Options of CPO's fork of verl.",
    "PPO_critic": "Options of PPO_critic's fork of verl.",
    "OpenRLHF": "The names since OpenRLHF 0.11 follow in a table of their own.",
    "PEFT": "Options of adapters, also where they stand within actor.lora, and TRL's names for them.",
    "TRL": "Options of GKD and of the other trainers that distil.",
    "ms-swift": "Options of adapters and distillation that are not called as OpenRLHF's or TRL's.",
    "NeMo-RL": "Options of adapters and distillation.",
    "SkyRL": "Options of adapters.",
    "miles": "Options of adapters that are not called as OpenRLHF's, and of distillation; also slime's.",
    "prime-rl": "Options of distillation.",
    "tinker": "Options of tinker-cookbook's distillation; its teacher_model is ms-swift's.",
    "vLLM": "Engine arguments, set as keys of rollout.engine.",
}


def render_peers() -> str:
    """Return the text of docs/migrating.md."""
    parts = [_HEADER]
    for framework, remark in _FRAMEWORKS.items():
        named = [(name, alias) for name, alias in ALIASES.items() if alias.framework == framework]
        own = [(name, alias) for name, alias in named if alias.key and name not in RENAMED]
        parts.append(f"## {framework}\n\n{remark}\n")
        parts.append(_table(("option", "here", "note"), (_row(name, alias) for name, alias in own)))
        if framework == "OpenRLHF":
            renamed = sorted({**RENAMED, **RENAMED_AS_HERE}.items())
            parts.append(_table(("since 0.11", "before"), (f"| `{new}` | `{old}` |" for new, old in renamed)))
        for title, unsupported in (("Not supported", True), ("Without need of a setting", False)):
            absent = [
                *((name, alias) for name, alias in named if not (alias.key or unsupported or name in RENAMED)),
                *((name, alias) for name, alias in ABSENT.items() if alias.framework == framework),
            ]
            rows = list(_by_note([each for each in absent if each[1].unsupported == unsupported]))
            if rows:
                parts.append(f"### {title}: {framework}\n\n" + _table(("options", "why, and what to do"), rows))
    return "\n".join(parts)


def _row(name: str, alias: Alias) -> str:
    keys = ", ".join(f"`{key}`" for key in alias.key.split())
    return f"| `{name}` | {keys} | {alias.note} |"


def _by_note(entries: list[tuple[str, Alias]]) -> Iterator[str]:
    """Yield one table row for each note, with all options to which the note applies."""
    for note, group in groupby(sorted(entries, key=lambda entry: entry[1].note), key=lambda entry: entry[1].note):
        yield f"| {', '.join(f'`{name}`' for name, _ in group)} | {note} |"


def _table(titles: tuple[str, ...], rows: Iterator[str] | list[str]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_peers(), encoding="utf-8")
    print_lines(f"wrote {PAGE}")
