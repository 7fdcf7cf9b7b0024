"""PodDisruptionBudgets: whom they protect, and how many of those may be evicted now.

The Eviction API has the last word; this is for choosing whom to ask for.
"""

from collections.abc import Mapping

import msgspec


class SelectorRequirement(msgspec.Struct, frozen=True):
    """One line of `matchExpressions`."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None

    def holds(self, labels: Mapping[str, object]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in (self.values or ())
            case "NotIn":
                return labels.get(self.key) not in (self.values or ())
            case "DoesNotExist":
                return self.key not in labels
            case "Exists":
                return self.key in labels
        return True  # an operator of the future: rather protect one too many


class LabelSelector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] | None = None
    match_expressions: tuple[SelectorRequirement, ...] | None = None

    def chooses(self, labels: Mapping[str, object]) -> bool:
        """An empty selector chooses everybody."""
        by_label = all(labels.get(key) == value for key, value in (self.match_labels or {}).items())
        return by_label and all(one.holds(labels) for one in self.match_expressions or ())


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    generation: int = 0


class _Spec(msgspec.Struct, frozen=True):
    selector: LabelSelector | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    disruptions_allowed: int = 0
    observed_generation: int = 0


class DisruptionBudget(msgspec.Struct, frozen=True):
    """One PodDisruptionBudget."""

    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def allowed(self) -> int:
        """How many may go now; none while its controller has not looked at its latest version."""
        is_old = self.status.observed_generation < self.metadata.generation
        return 0 if is_old else max(0, self.status.disruptions_allowed)

    def protects(self, namespace: str, labels: Mapping[str, object]) -> bool:
        """Without a selector it protects nobody."""
        selector = self.spec.selector
        return selector is not None and namespace == self.metadata.namespace and selector.chooses(labels)


class DisruptionBudgetList(msgspec.Struct, frozen=True):
    items: tuple[DisruptionBudget, ...] = ()
