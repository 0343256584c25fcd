"""Which workers have which roles (`cluster.roles`).

Enters: the order of a run's workers, and how many there are. Leaves: teams: workers with the same models, which compute them together.
Guaranteed: every worker is in one team; the actor's comes first and has all roles without workers of their own, so a run with one team is
like a run without `cluster.roles`. A role of `cluster.roles` that this run does not have, such as a critic in an evaluation, gets no team.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fulltilt.cluster.checks import refuse
from fulltilt.cluster.making import WorkerOrder
from fulltilt.parallel.ranks import Ranks
from fulltilt.plan.decisions import size_key
from fulltilt.plan.legal import given_division, too_few, wrong_groups
from fulltilt.words import many


@dataclass(frozen=True, eq=False)
class Team:
    order: WorkerOrder  # the order that each of its workers is made from
    ranks: range

    @property
    def label(self) -> str:
        """The name for its workers in messages: their only role; empty for the actor's team."""
        return self.order.only or ""


def teams_of(order: WorkerOrder, size: int) -> list[Team]:
    used = {*order.roles, *(["reward_model"] if order.encoder else [])}
    counts = {role: count for role, count in sorted(order.config.cluster.roles.items()) if role in used}
    refuse((*too_few(order.config, size), *(wrong_groups(order.config, size) if order.roles else ())))
    end = size - sum(counts.values())
    found = [Team(order.of_team(None, counts), range(end))]
    for role, count in counts.items():
        found.append(Team(order.of_team(role, counts), range(end, end + count)))
        end += count
    refuse([text for team in found if team.order.roles for text in undivided(team)])
    return found


def undivided(team: Team) -> Iterator[str]:
    """List sizes that do not divide the team's number of workers, which only the cluster may have known."""
    config, names = team.order.config, ("tensor_parallel", "expert_parallel")
    division = given_division(config)
    sizes: dict[str, int] = {}
    for role in team.order.roles:
        own = division.of(config, role)
        sizes |= {size_key(config, role, name): size for name, size in zip(names, (own.tensor, own.experts), strict=True)}
    if team.order.sampled:
        sizes["rollout.tensor_parallel"] = division.rollout
    for key, size in sizes.items():
        if len(team.ranks) % size:
            whose = f"the {many(len(team.ranks), 'worker')} of the {team.label or 'actor'}"
            yield f"{key}: {size} does not divide {whose}. Use a number that does, or another number of workers"


def join_team(
    rank: int, teams: Sequence[range], everyone: dist.ProcessGroup | None, *, beside: int, sharing: int = 1,
    deadline: timedelta | None = None,
) -> Ranks:  # fmt: skip
    """Join a worker with the others of its team. All processes of the run must call this at the same time. `everyone`: the group of all
    workers.

    Afterwards all workers of a team are in equally many groups, which matters when some of them make another group: torch names a group
    after its ranks and the number of groups that a process is in, and workers with different names for a group wait for one another
    forever."""
    if len(teams) == 1:
        return Ranks(rank, len(teams[0]), everyone, beside, sharing, deadline=deadline)
    groups = [dist.new_group(list(team), timeout=deadline) if len(team) > 1 else None for team in teams]
    own = next((place for place, team in enumerate(teams) if rank in team), 0)
    team = teams[own]
    after = teams[-1].stop - team.stop
    return Ranks(rank - team.start, len(team), groups[own], beside, sharing, before=team.start, after=after, deadline=deadline)
