"""Serve a counter as an environment of OpenEnv; run by a Python that has openenv and not megarl. Prints its port."""

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class CountAction(Action):
    add: int


class CountObservation(Observation):
    count: int


class Counter(Environment[CountAction, CountObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **_: Any) -> Any:
        assert seed == 3904355907
        self.count = start
        return CountObservation(count=start)

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> Any:
        self.count += action.add
        return CountObservation(count=self.count, reward=0.5, done=self.count >= 3)

    @property
    def state(self) -> State:
        return State(step_count=0)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    app = create_fastapi_app(Counter, CountAction, CountObservation, max_concurrent_envs=4)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
