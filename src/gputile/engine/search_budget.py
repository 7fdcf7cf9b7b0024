"""Search budgets: what one decision may cost, however many nodes, sets of cards and sets of victims it is about.

One decision has one budget, and all its parts spend from it. Steps are the first bound, so that the same request gets
the same answer in a replay and in a test. Time is the second bound, and only where the caller passes a clock: the core
has none. A search without budget stops, and its answer says "not searched further".
"""

import math
from collections.abc import Callable

NOT_SEARCHED_FURTHER = "not searched further"

FREE_STEPS = 100
"""Steps that are allowed after the deadline: more than any real pod needs on one node. A machine that was paused for a
moment must not make us reject a pod that fits."""


class SearchBudget:
    """The steps and seconds that are left for one decision."""

    def __init__(self, steps: int, seconds: float = math.inf, now: Callable[[], float] | None = None) -> None:
        self._left, self._spent, self._now = steps, 0, now
        self._until = now() + seconds if now is not None else math.inf
        self._whole: SearchBudget | None = None
        self.ran_out = False
        """Whether a search was cut short."""

    def part(self, steps: int, seconds: float = math.inf) -> "SearchBudget":
        """At most this much of what is left, for one node of many; the whole budget pays for what the part spends."""
        part = SearchBudget(min(steps, self._left), seconds, self._now)
        part._whole, part._until = self, min(part._until, self._until)
        return part

    def half(self) -> "SearchBudget":
        """Half of what is left; the other half is for the next search."""
        seconds = (self._until - self._now()) / 2 if self._now is not None else math.inf
        return self.part((self._left + 1) // 2, seconds)

    @property
    def is_spent(self) -> bool:
        return self._left <= 0 or (self._now is not None and self._spent >= FREE_STEPS and self._now() >= self._until)

    def spend(self, steps: int = 1) -> bool:
        """Spend steps if any are left; otherwise record that the search was cut short."""
        if self.is_spent:
            self.cut_short()
            return False
        budget: SearchBudget | None = self
        while budget is not None:
            budget._left -= steps
            budget._spent += steps
            budget = budget._whole
        return True

    def cut_short(self) -> None:
        """Record that something was left unsearched."""
        budget: SearchBudget | None = self
        while budget is not None:
            budget.ran_out = True
            budget = budget._whole
