"""What one rank says of roles on one base: outputs before and after their updates, and the memory of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.types import FloatArray, Row
from megarl.types.messages import ForwardRequest, LoadRequest, Part, Role, RoleSpec, UpdateRequest
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCase:
    """Roles of one layout, rows by micro-batch and data-parallel rank, and updates one after the other."""

    roles: tuple[RoleSpec, ...]
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    updates: Sequence[UpdateRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOutcome:
    """before, after: by role and row, empty off the last stage. grad_norms: of the updates, there alone as well.

    added: bytes of a role's parameters that no role before it has. trained: bytes of those that it trains. freed: bytes
    that are freed when its parameters leave the device.
    """

    before: Mapping[Role, Mapping[int, FloatArray]]
    after: Mapping[Role, Mapping[int, FloatArray]]
    grad_norms: Mapping[Role, float]
    added: Mapping[Role, int]
    trained: Mapping[Role, int]
    freed: Mapping[Role, int]


def run_shared(context: RankContext, case: SharedCase) -> SharedOutcome:
    worker = join_layout(context, case.roles[0].layout)
    worker.load(LoadRequest(roles=case.roles, seed=0))
    mine, roles = case.micro_batches[worker.layout.dp_group.rank()], [spec.role for spec in case.roles]

    def outputs() -> dict[Role, Mapping[int, FloatArray]]:
        found = {}
        for role in roles:
            result = worker.forward(case.rows, mine, ForwardRequest(role=role, temperature=1.0, step=0))
            name = "values" if role in (Role.CRITIC, Role.REWARD) else "logprobs"
            found[role] = result.quantities[name] if result else {}
        return found

    before, seen, added, trained, freed = outputs(), set[int](), {}, {}, {}
    for role in roles:
        parameters = [p for chunk in worker.roles[role].chunks for p in chunk.parameters()]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
        added[role] = sum(size for key, size in storages.items() if key not in seen)
        trained[role] = sum(p.nbytes for p in parameters if p.requires_grad)
        seen |= storages.keys()
    # A base is the last to leave.
    for role in reversed([spec.role for spec in case.roles if spec.has_memory]):
        freed[role] = worker.offload(role, [Part.PARAMS])
    for role in freed:
        worker.onload(role, [Part.PARAMS])
    norms = {}
    for request in case.updates:
        result = worker.update(case.rows, mine, request)
        if result is not None:
            norms[request.role] = result.metrics[f"{request.role}/grad_norm"]
    return SharedOutcome(before=before, after=outputs(), grad_norms=norms, added=added, trained=trained, freed=freed)
