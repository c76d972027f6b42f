"""Run one trial of Harbor as an agent.

The words of the command line are a directory of tasks and Harbor's configuration of a trial as JSON, without its task.
The row's `extra_info.task` is the name of a directory in it. Harbor's terminus-2, which runs outside of the container
and so reaches the endpoint, is the agent unless the configuration names another.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


async def main(tasks: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a trial; return the verifier's rewards."""
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    name = str(json.load(sys.stdin)["extra_info"].get("task"))
    task = Path(tasks, name).resolve()
    if task.parent != Path(tasks).resolve() or not (task / "task.toml").is_file():
        sys.exit(f"error: extra_info.task is {name}, expected a directory of {tasks} with a task.toml")
    with tempfile.TemporaryDirectory() as trials:
        config = {**settings, "task": {"path": str(task)}, "trials_dir": trials}
        config["agent"] = {"name": "terminus-2", "model_name": "openai/policy", **settings.get("agent", {})}
        result = await (await Trial.create(TrialConfig.model_validate(config))).run()
    # An agent that was late is verified all the same.
    rewards = (result.verifier_result and result.verifier_result.rewards) or {}
    if not rewards and (raised := result.exception_info) is not None:
        sys.exit(f"error: {raised.exception_type}: {raised.exception_message}")
    if "reward" not in rewards and len(rewards) != 1:
        sys.exit(f"error: the verifier's rewards are {sorted(rewards)}, expected one of the name reward")
    return {**rewards, "reward": rewards.get("reward", next(iter(rewards.values())))}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))))
