"""Serve the counter of NeMo Gym and its head server, without Ray; run by a Python that has nemo-gym and not megarl.

Prints the port of the head server.
"""

import asyncio
import socket

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import HeadServer, ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

NAME, HOST = "example_session_state_mgmt_resources_server", "127.0.0.1"


async def main() -> None:
    listeners = [socket.create_server((HOST, 0)) for _ in range(2)]
    port, head_port = (each.getsockname()[1] for each in listeners)
    head_config = BaseServerConfig(host=HOST, port=head_port)
    counter = StatefulCounterResourcesServer(
        config=StatefulCounterResourcesServerConfig(name=NAME, host=HOST, port=port, entrypoint="app.py"),
        server_client=ServerClient(head_server_config=head_config, global_config_dict=OmegaConf.create({})),
    )
    head = HeadServer(config=head_config)
    url = f"http://{HOST}:{port}"
    head.set_server_instances([{"process_name": NAME, "server_type": "resources_servers", "url": url}])
    print(head_port, flush=True)
    apps = zip([counter.setup_webserver(), head.setup_webserver()], listeners, strict=True)
    await asyncio.gather(
        *(uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[place]) for app, place in apps)
    )


if __name__ == "__main__":
    asyncio.run(main())
