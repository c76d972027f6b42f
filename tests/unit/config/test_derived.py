"""What settings that are null become, and that a setting of the user's own stays as it is."""

from dataclasses import replace
from typing import Any

import pytest

from megarl.config.derived import Derived, filled, host_group, left_open
from megarl.config.generation import PlacementConfig, SyncConfig
from megarl.config.parse import from_dict
from megarl.config.schema import ClusterConfig, Config, NodesConfig
from megarl.host.device.platform import PLATFORMS

CPU, CUDA = PLATFORMS["cpu"](), PLATFORMS["cuda"]()
TWO_NODES = PlacementConfig(trainer=NodesConfig(num_nodes=2))


@pytest.mark.parametrize(
    ("settings", "here", "expected"),
    [
        ({}, CUDA, "device"),
        ({"delta": True}, CUDA, "gloo"),
        ({}, CPU, "gloo"),
        ({"delta": True}, CPU, "gloo"),
        ({"host_group": "gloo"}, CUDA, "gloo"),
        ({"host_group": "device"}, CPU, "device"),
    ],
)
def test_the_connection_between_hosts(settings: dict[str, Any], here: Any, expected: str) -> None:
    sync = SyncConfig(**settings)
    assert sync.group_between_hosts(here) == expected
    derived = host_group(Config(sync=sync, placement=TWO_NODES), here)
    assert derived is not None
    assert derived.value == expected


def test_a_single_host_needs_no_connection_to_others() -> None:
    assert host_group(Config(), CUDA) is None
    assert host_group(Config(placement=PlacementConfig(mode="split")), CUDA) is not None


def test_only_null_is_filled() -> None:
    found = Derived(key="sync.host_group", value="device", reason="it is"), None
    assert filled(Config(), found).sync == SyncConfig(host_group="device")
    assert left_open(Config(), found) == found[:1]
    asked = Config(sync=SyncConfig(host_group="gloo"))
    assert filled(asked, found) == asked
    assert left_open(asked, found) == ()


def test_a_run_file_of_an_earlier_version_means_what_it_says() -> None:
    """It has the defaults of then, which saved configurations spell out."""
    config = from_dict(Config, {"sync": {"host_group": "gloo"}, "cluster": {"object_store_mib": 256}})
    assert config.sync.group_between_hosts(CUDA) == "gloo"
    assert config.cluster == replace(ClusterConfig(), object_store_mib=256)
