"""A fleet in which pods hold less on a few nodes, to look at without changing the fleet.

The fleet answers for all nodes, from its own arrays and caches; a copy of the few nodes answers for these, and the two
answers are put together. Queries that depend on all nodes at once read whole arrays. These are copied only when a query
first needs them, because copying all cards costs as much as a decision.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gputile.engine.fleet.fleet import Fleet
from gputile.engine.fleet.free_arrays import Mask
from gputile.engine.fleet.reasons import FirstMisses
from gputile.engine.placement.place import Placement
from gputile.engine.placement.units import split
from gputile.engine.policies.table import MOST_UNITS, Scores
from gputile.engine.search_budget import SearchBudget
from gputile.model.cards import FreeCapacity, Node, NodeView, Use
from gputile.model.refusals import Refusal
from gputile.model.requests import PodRequest

FREE = ("_memory", "_cores", "_slots", "_tenants", "_card_share", "_cpu", "_host", "_share")
"""The arrays that depend on what pods hold."""


class FleetOverlay(Fleet):
    """The fleet with some nodes replaced by those of a part of it; read-only, and valid until the fleet changes."""

    def __init__(self, fleet: Fleet, part: Fleet) -> None:
        vars(self).update({name: value for name, value in vars(fleet).items() if name not in FREE})
        self._fleet, self._part = fleet, part
        self._replaced = np.array(self._rows_of(part.names()), dtype=np.intp)

    def __getattr__(self, name: str) -> Any:
        """An array of `FREE` that no query has read yet."""
        if name not in FREE:
            raise AttributeError(name)
        array = self._with_part(getattr(self._fleet, name).copy(), getattr(self._part, name))
        setattr(self, name, array)
        return array

    def _with_part(self, answer: NDArray[Any], of_part: NDArray[Any]) -> NDArray[Any]:
        """The answer for all nodes, with that for the replaced nodes written into it."""
        answer[..., self._replaced] = of_part
        return answer

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def view(self, name: str) -> NodeView:
        return (self._part if name in self._part else self._fleet).view(name)

    def free_capacity(self, name: str, uuid: str) -> FreeCapacity | None:
        return (self._part if name in self._part else self._fleet).free_capacity(name, uuid)

    def _apply(self, name: str, uses: Mapping[str, Use], cpu: int, memory: int, sign: int) -> NoReturn:
        raise TypeError("an overlay is read-only; change the fleet")

    def set_node(self, node: Node) -> NoReturn:
        raise TypeError("an overlay is read-only; change the fleet")

    def remove_node(self, name: str) -> NoReturn:
        raise TypeError("an overlay is read-only; change the fleet")

    # ---- queries ----------------------------------------------------------------------------------------------------

    def fits(self, request: PodRequest, budget: SearchBudget | None = None) -> Mask:
        of_part = self._part.fits(request, budget)  # first, as the pod's own nomination may need the search budget
        return self._with_part(self._fleet.fits(request, budget), of_part)

    def _learnt_scores(self, fitting: Mask, request: PodRequest, policy: str) -> Scores:
        if len(split(request)) > MOST_UNITS:  # which nodes are scored depends on all nodes
            return self.scorer.over(self).scores_where(fitting, request, policy)
        of_part = self._part._learnt_scores(fitting[self._replaced], request, policy)
        return self._with_part(self._fleet._learnt_scores(fitting, request, policy), of_part)

    def _simple_scores(self, request: PodRequest, policy: str) -> Scores:
        scores = self._fleet._simple_scores(request, policy).copy()
        return self._with_part(scores, self._part._simple_scores(request, policy))

    def place(
        self,
        request: PodRequest,
        name: str,
        policy: str | None = None,
        seed: int = 0,
        budget: SearchBudget | None = None,
    ) -> Placement | Refusal:
        return (self._part if name in self._part else self._fleet).place(request, name, policy, seed, budget)

    def _judge(self, request: PodRequest, budget: SearchBudget) -> tuple[Mask, Mask, FirstMisses]:
        fitting_in_part, _, misses_in_part = self._part._judge(request, budget)
        fitting, resolvable, misses = self._fleet._judge(request, budget)
        misses.replace(self._replaced, misses_in_part)
        return self._with_part(fitting, fitting_in_part), resolvable, misses
