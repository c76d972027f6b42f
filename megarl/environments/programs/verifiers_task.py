"""Play one task of verifiers as an agent.

The words of the command line are a taskset and the block `env` of verifiers' configuration as JSON, which names each
agent's harness and runtime. The row's `extra_info.task` is the place of the task. An agent that shall not train has
`trainable` false, and a model among the environment's `untrained_models`.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any


async def main(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run an episode; return its reward and metrics."""
    import verifiers.v1 as vf

    place = json.load(sys.stdin)["extra_info"].get("task")
    if not isinstance(place, int):
        sys.exit(f"error: extra_info.task is {place!r}, expected the place of a task of {name}")
    config = {**settings, "taskset": {**settings.get("taskset", {}), "id": name}}
    env = vf.load_environment(vf.resolve_env_config(config))
    task = next(itertools.islice(env.taskset, place, None), None)
    if task is None:
        sys.exit(f"error: extra_info.task is {place}, which {name} does not have")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_slot(*env.slots(task), vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        sys.exit(f"error: {errors[-1].message if errors else 'the episode failed'}")
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if len(trained) != 1:
        sys.exit(f"error: {len(trained)} agents train, expected one; set trainable to false for the others")
    found = {key: value for key, value in trained[0].metrics.items() if value is not None}
    return {**found, "reward": trained[0].reward}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))))
