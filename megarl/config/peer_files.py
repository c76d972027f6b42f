"""Read the options of a training run of verl, OpenRLHF or LUFFY from its shell script or YAML file.

Scripts are read, not run: assignments are followed from top to bottom, including those in branches and functions.
Environment variables other than HOME count as unknown.
"""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.config.aliases import ALIASES, leaves
from megarl.config.aliases_openrlhf import RENAMED, SAME
from megarl.config.load import read_yaml
from megarl.errors import ConfigError

# By what starts a run, its framework; the first that matches counts.
_LAUNCHERS: Mapping[str, str] = {
    r"openrlhf\S*train_ppo\w*": "OpenRLHF",
    r"\bmain_mix_ppo(?:\.py)?\b": "LUFFY",
    r"\bmain_(?!mix)\w+(?:\.py)?\b": "verl",
}
_BRACES = r"\$\{(?:[^{}\n]|\$\{[^{}\n]*\})*\}"
_WORD = rf"""(?:{_BRACES}|\$\(\([^\n]*?\)\)|\$\([^)\n]*\)|"(?:{_BRACES}|[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s;"'|&(){{}}])*"""
_ASSIGNMENT = re.compile(rf"^\s*(?:(?:export|local|readonly|declare)\s+)?(\w+)(\+?)=(\([^()]*\)|{_WORD})", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^${}]*))?\}|\$(\w+)")
_CALCULATION = re.compile(r"\$\(\(([^$]*?)\)\)(?!\))")
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_]\w*(?:\.\w+)+)(?:,([^${}]*))?\}")
_ALL_ARGUMENTS = re.compile(r"\"?\$(?:@|\*|\{@[^}]*\})\"?")
_SHELL = ("|", "&", ";", ">", "2>", "<")
_OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options of one training run of another framework, under the names that `aliases` uses.

    `unreadable`: options whose value the file does not tell, as written there, each with the reason.
    """

    framework: str
    options: Mapping[str, Any]
    unreadable: Mapping[str, str]


def read_peer_file(path: Path) -> PeerOptions:
    """Read the options from a YAML file, or from the command in a shell script that starts training."""
    if path.suffix in (".yaml", ".yml"):
        tree = read_yaml(path)
        is_verl = any(section in tree for section in ("actor_rollout_ref", "algorithm", "trainer"))
        framework = "verl" if is_verl else "OpenRLHF"
        found = [(name, _value(value) if isinstance(value, str) else value) for name, value in leaves("", tree)]
    else:
        framework, found = _read_script(path)
    options: dict[str, Any] = {}
    for name, value in found:
        options[name.lstrip("+~").replace("-", "_") if framework == "OpenRLHF" else name.lstrip("+~")] = value
    if framework == "OpenRLHF":
        options = {RENAMED.get(name) or SAME.get(name) or name: value for name, value in options.items()}
    elif any(name in ALIASES and ALIASES[name].framework == "LUFFY" for name in options):
        framework = "LUFFY"
    resolved = {name: _resolve(value, options) for name, value in options.items()}
    unknown = {name: value for name, value in resolved.items() if isinstance(value, str) and "$" in value}
    return PeerOptions(
        framework=framework,
        options={name: value for name, value in resolved.items() if name not in unknown},
        unreadable={f"{name}={value}": "the file does not say what it stands for" for name, value in unknown.items()},
    )


def _read_script(path: Path) -> tuple[str, list[tuple[str, Any]]]:
    """Return a script's framework and the options of the first command in it that starts training."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a shell script or a YAML file of verl, OpenRLHF or LUFFY")
    text = re.sub(r"^\s*#.*$|\s#\s.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    # "${LIST[@]}" is as many words as the list has.
    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text.replace("\\\n", " "))
    variables = {"HOME": str(Path.home())}
    for name, appends, written in _ASSIGNMENT.findall(text):
        plain = " ".join(_split(written[1:-1])) if written.startswith("(") else "".join(_split(written, joined=True))
        value = _expand(plain, variables)
        variables[name] = f"{variables.get(name, '')} {value}" if appends else value
    for line in text.splitlines():
        expanded = _expand(_ALL_ARGUMENTS.sub("", line), variables)
        for launcher, framework in _LAUNCHERS.items():
            if (found := re.search(launcher, expanded)) and not _ASSIGNMENT.match(line):
                arguments = list(_until_shell(shlex.split(expanded[found.end() :])))
                read = _flags if framework == "OpenRLHF" else _overrides
                return framework, list(read(arguments))
    raise ConfigError(
        f"{path}: no command that starts training, such as python3 -m verl.trainer.main_ppo or "
        "python3 -m openrlhf.cli.train_ppo_ray; give the script that has it, or a YAML file"
    )


def _split(text: str, *, joined: bool = False) -> list[str]:
    """Split a command into words as a shell does, and remove quotes; `joined` does not split at blanks (for a single
    value).
    """
    if joined:
        return [re.sub(r"""^(["'])(.*)\1$""", r"\2", text, flags=re.DOTALL)]
    return [shlex.quote(word) if " " in word else word for word in shlex.split(text)]


def _until_shell(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith(_SHELL):
            return
        yield word


def _overrides(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of Hydra arguments `name=value`. For others, such as `--config-name=X`, the name is the
    argument.
    """
    for argument in arguments:
        name, equals, text = (
            argument.lstrip("-").partition("=") if argument.startswith("--") else argument.partition("=")
        )
        yield (f"hydra.{name}" if argument.startswith("--") else name), _value(text) if equals else True


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of arguments `--name value ...`: True if there is no value, and a list if there are
    several.
    """
    name: str | None = None
    values: list[Any] = []
    for argument in (*arguments, "--"):
        if not argument.startswith("--"):
            values.append(_value(argument))
            continue
        if name:
            yield name, values[0] if len(values) == 1 else (values or True)
        name, equals, text = argument[2:].partition("=")
        values = [_value(text)] if equals else []


def _value(text: str) -> Any:
    """Parse a value as YAML, or keep it as text if it is not YAML. `None` and `1e-6` mean what they mean in Python."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if value == "None":
        return None
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
        return float(value)
    return value


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace shell variables by their values or defaults, and arithmetic `$((…))` by its result, as far as they are
    known.
    """

    def look_up(match: re.Match[str]) -> str:
        default = match[2].strip("\"'") if match[2] is not None else match[0]
        return variables.get(match[1] or match[3], default)

    def calculate(match: re.Match[str]) -> str:
        named = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        try:
            return str(_number(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    before = None
    while before != text and len(text) < 1_000_000:
        before, text = text, _CALCULATION.sub(calculate, _VARIABLE.sub(look_up, text))
    return text


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no whole numbers with + - * / %")


def _resolve(value: Any, options: Mapping[str, Any]) -> Any:
    """Replace references such as ${data.max_prompt_length} to options of the same file, where those are known."""
    for _ in range(len(options)):
        found = _INTERPOLATION.search(value) if isinstance(value, str) else None
        if found is None or (found[1] not in options and found[2] is None):
            return value
        target = options.get(found[1], _value(found[2] or ""))
        value = target if found[0] == value else value.replace(found[0], str(target))
    return value
