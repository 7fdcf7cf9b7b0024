"""PodDisruptionBudgets: which pods they select, and how many of these may be evicted now.

The Eviction API decides; this module only helps to choose victims that it will accept.
"""

from collections.abc import Mapping

import msgspec


class SelectorRequirement(msgspec.Struct, frozen=True):
    """One entry of `matchExpressions`."""

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
        return True  # an unknown operator: protecting a pod too many is safe


class LabelSelector(msgspec.Struct, frozen=True, rename="camel"):
    """A meta/v1 LabelSelector."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[SelectorRequirement, ...] | None = None

    def chooses(self, labels: Mapping[str, object]) -> bool:
        """Whether the selector matches these labels. An empty selector matches all pods."""
        by_label = all(labels.get(key) == value for key, value in (self.match_labels or {}).items())
        return by_label and all(requirement.holds(labels) for requirement in self.match_expressions or ())


class _Metadata(msgspec.Struct, frozen=True):
    """The `metadata` of a PodDisruptionBudget, as far as gputile reads it."""

    name: str = ""
    namespace: str = ""
    generation: int = 0


class _Spec(msgspec.Struct, frozen=True):
    """The `spec` of a PodDisruptionBudget, as far as gputile reads it."""

    selector: LabelSelector | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    """The `status` of a PodDisruptionBudget, as far as gputile reads it."""

    disruptions_allowed: int = 0
    observed_generation: int = 0


class DisruptionBudget(msgspec.Struct, frozen=True):
    """A policy/v1 PodDisruptionBudget."""

    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def allowed(self) -> int:
        """The evictions allowed now; 0 while its controller has not observed the latest generation."""
        is_stale = self.status.observed_generation < self.metadata.generation
        return 0 if is_stale else max(0, self.status.disruptions_allowed)

    def protects(self, namespace: str, labels: Mapping[str, object]) -> bool:
        """Whether the budget selects a pod. Without a selector it selects none."""
        selector = self.spec.selector
        return selector is not None and namespace == self.metadata.namespace and selector.chooses(labels)


class DisruptionBudgetList(msgspec.Struct, frozen=True):
    """A PodDisruptionBudgetList."""

    items: tuple[DisruptionBudget, ...] = ()
