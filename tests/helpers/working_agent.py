"""A harness for whole runs with a model of random weights: a program that asks for three turns, and writes a file."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.environments.harness import Assignment, Launch

NUM_TURNS, CHECK = 3, "import sys; text = open('answer.txt').read(); sys.exit(len(text) % 2)"


def start(given: "Assignment") -> "Launch":
    # The program itself imports nothing of megarl.
    from megarl.environments.harness import Launch

    return Launch(command=(sys.executable, __file__), variables={})


def main() -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": sys.stdin.read()}]
    for number in range(NUM_TURNS):
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            data=json.dumps({"model": "policy", "messages": messages, "max_tokens": 16}).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages += [message, {"role": "user", "content": f"And then, {number}?"}]
        time.sleep(0.3)
    Path("answer.txt").write_text("".join(str(each["content"]) for each in messages))


if __name__ == "__main__":
    main()
