"""The groups of workers that a worker belongs to, for dividing and sharding models.

Enters: all workers with the same roles. Leaves: a `Grid`. Guaranteed: members that hold the parts of one model are neighbours, so that they
are on one machine if their number divides that of a machine's workers; every worker is in as many groups as the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True, eq=False)
class Grid:
    """Groups of a worker. Example, 8 workers with layers in 2 parts: worker 5 is the second member of group 4 5, and the third of group 1 3
    5 7, which has its part."""

    everyone: Ranks = ALONE
    tensor: Ranks = ALONE  # the members that hold the parts of each layer, and compute it together
    data: Ranks = ALONE  # the workers that have the same part, or the whole model, and shard it
    experts: Ranks = ALONE  # the workers that together hold all experts
    replicas: Ranks | None = None  # the workers that hold the same experts; None: experts are not divided
    rollout: Ranks = ALONE  # the members that sample together, each with a part of every layer

    @staticmethod
    def of(ranks: Ranks, tensor: int = 1, experts: int = 1, rollout: int = 1) -> Grid:
        """Make the groups. All workers must call this at the same time. `tensor`: among how many workers each layer is divided. `experts`:
        among how many experts are divided. `rollout`: among how many each layer of the engine's model is divided."""
        assert 1 in (tensor, experts)
        together = ranks.line(tensor) if tensor > 1 else ALONE
        sampling = together if rollout == tensor else ranks.line(rollout) if rollout > 1 else ALONE
        if experts > 1:
            replicas = ranks.line(ranks.size // experts, experts)
            return Grid(ranks, data=ranks, experts=ranks.line(experts), replicas=replicas, rollout=sampling)
        return Grid(ranks, together, ranks.line(ranks.size // tensor, tensor) if tensor > 1 else ranks, rollout=sampling)


ONE_WORKER = Grid()
