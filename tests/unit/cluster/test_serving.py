"""Which runs a cluster serves, told from configurations alone."""

from collections.abc import Sequence

import pytest

from megarl.cluster.roles import actor_role, check_serves
from megarl.config import Config
from megarl.config.load import with_overrides
from megarl.config.schema import LayoutConfig
from megarl.errors import ConfigError
from megarl.types.messages import Role, RoleSpec

OURS = with_overrides(Config(), ["actor.layout.tp=2"])
LAYOUTS = (OURS.actor.layout,)


def check(*overrides: str, roles: Sequence[RoleSpec] = ()) -> None:
    theirs = with_overrides(OURS, overrides)
    check_serves(OURS, LAYOUTS, theirs, [actor_role(theirs), *roles])


def test_what_may_differ() -> None:
    check("run.seed=3", "run.name=b", "algo.name=x", "model.path=elsewhere", "trainer.total_steps=3")
    check("rollout.max_response_tokens=16", "actor.optimizer.lr=1", "rollout.num_samples=2", "rollout.top_k=20")


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("actor.layout.tp=1", "actor.layout"),
        ("placement.offload=true", "placement"),
        ("model.dtype=float32", "model.dtype"),
        ("rollout.engine.num_engines=2", "rollout.engine"),
        ("sync.dtype=float8_e4m3", "sync.dtype"),
        ("sync.delta=true", "sync.delta"),
        ("sync.delta_full_every=7", "sync.delta_full_every"),
        ("sync.cuda_ipc=true", "sync.cuda_ipc"),
        ("run.deterministic=true", "run.deterministic"),
        ("rollout.max_response_tokens=1025", "rollout.engine.max_model_tokens"),
        ("rollout.top_k=21", "rollout.top_k"),
        ("rollout.head_tokens=32", "rollout.head_tokens"),
    ],
)
def test_what_may_not(override: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^this cluster was started with another {name}; start one for this run$"):
        check(override)


def test_a_role_needs_ranks_of_its_layout() -> None:
    critic = RoleSpec(role=Role.CRITIC, model=OURS.model, settings=OURS.actor)
    check(roles=[critic])
    other = with_overrides(OURS, ["actor.layout.tp=4"])
    with pytest.raises(ConfigError, match=r"another critic\.layout;"):
        check(roles=[RoleSpec(role=Role.CRITIC, model=OURS.model, settings=other.actor)])
    check_serves(
        OURS,
        (*LAYOUTS, LayoutConfig(tp=4)),
        OURS,
        [actor_role(OURS), RoleSpec(role=Role.CRITIC, model=OURS.model, settings=other.actor)],
    )
