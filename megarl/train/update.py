"""Update the trained roles on the rows of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster import offloading
from megarl.config.batches import actor_learns, mini_batch_prompts
from megarl.config.schema import TrainerConfig
from megarl.record.metrics import Timers
from megarl.train.passes import BatchUpdate, RoleUpdater
from megarl.types import AlgoState, Row
from megarl.types.messages import Role, RoleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStage:
    """The stage that updates every trained role on the rows of a step, the critic before the actor.

    roles: all models of the run. enter: called before each role's update, with the `Phase` that says what memory must
    be on the devices for it.
    """

    trainer: TrainerConfig
    updaters: Mapping[Role, RoleUpdater]
    roles: Sequence[RoleSpec] = ()
    has_critic: bool
    critic_warmup_steps: int = 0
    enter: Callable[[offloading.Phase], None]
    timers: Timers

    def num_steps(self, role: Role) -> int:
        """Return how many optimizer steps a role has taken; 0 if it is not trained."""
        return self.updaters[role].num_optimizer_steps if role in self.updaters else 0

    def update(
        self, rows: Sequence[Row], state: AlgoState, *, step: int
    ) -> tuple[dict[str, float], BatchUpdate | None]:
        """Update the trained roles; return the metrics of all of them, and the actor's update.

        The latter is None before step `critic.warmup_steps`, when only the critic is updated.
        """
        metrics = {"critic/frozen": 1.0} if self.has_critic and Role.CRITIC not in self.updaters else {}
        learned = None
        for role, updater in reversed(list(self.updaters.items())):
            is_waiting = self.has_critic and not actor_learns(step, critic_warmup_steps=self.critic_warmup_steps)
            if role is Role.ACTOR and is_waiting:
                continue
            self.enter(updater.updating(self.roles))
            with self.timers(f"update_{role}"):
                result = updater.update_on_batch(
                    rows,
                    state,
                    step=step,
                    mini_batch_prompts=mini_batch_prompts(self.trainer),
                    num_epochs=self.trainer.num_epochs,
                )
            metrics |= result.metrics
            if role is Role.ACTOR:
                learned = result
        return metrics, learned
