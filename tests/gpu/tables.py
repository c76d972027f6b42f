"""Keep what steps of a sitting came to, in JSON that the next one goes on from, and as a table in Markdown."""

import json
import sys
from pathlib import Path


def main(file: Path, command: str, name: str, *result: str) -> int:
    """`done NAME`: exit with 0 if the step is there. `add NAME EXIT SECONDS LOG`: add it, with the last line of LOG."""
    steps = json.loads(file.read_text()) if file.is_file() else {}
    if command == "done":
        return int(name not in steps)
    code, seconds, log = result
    lines = [line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    steps[name] = {"exit": int(code), "seconds": int(seconds), "said": lines[-1] if lines else ""}
    file.write_text(json.dumps(steps, indent=1))
    rows = [f"| {key} | {each['exit']} | {each['seconds']} | {each['said']} |" for key, each in steps.items()]
    file.with_suffix(".md").write_text("\n".join(["| step | exit | s | last line |", "|---|---|---|---|", *rows, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
