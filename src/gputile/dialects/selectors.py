"""Annotations that select cards or policies, where more than one dialect honours them.

HAMi's and NVIDIA's keys are read in every dialect on `nvidia.com/*`; the keys of gputile are read in all dialects, so
that a pod can name a model or a policy without changing its resources.
"""

from gputile.dialects.kube_objects import Pod, Text
from gputile.dialects.parsing import UnreadableValue, flag, listed, one_of, quoted
from gputile.model.policies import POLICY_NAMES
from gputile.model.refusals import RequestError
from gputile.model.requests import Constraints, Match, ModelRule, Strength

POLICY = {name: name for name in POLICY_NAMES}
STRENGTH = {"prefer": Strength.PREFER, "require": Strength.REQUIRE, "no": Strength.NO}

MODEL_KEYS = ("nvidia.com/gpu.model", "nvidia-gpu-scheduler/gpu.model")
SHARING_MODES = frozenset({"hami-core", "mig", "mps"})


def rules(annotations: Text, key: str, match: Match) -> tuple[ModelRule, ...]:
    """A comma list as a rule; an empty list makes none."""
    models = listed(annotations, key)
    return (ModelRule(models, match),) if models else ()


def by_gputile_keys(pod: Pod) -> Constraints:
    """The annotations of gputile, `gputile.io/...`."""
    annotations = pod.annotations
    policy = one_of(annotations, "gputile.io/policy", POLICY)
    return Constraints(
        models=rules(annotations, "gputile.io/model", Match.NAME),
        not_models=rules(annotations, "gputile.io/not-model", Match.NAME),
        uuids=frozenset(listed(annotations, "gputile.io/uuid")),
        not_uuids=frozenset(listed(annotations, "gputile.io/not-uuid")),
        numa=one_of(annotations, "gputile.io/numa", STRENGTH) or Strength.NO,
        links=one_of(annotations, "gputile.io/links", STRENGTH) or Strength.NO,
        node_policy=policy,
        card_policy=policy,
    )


def by_nvidia_keys(pod: Pod) -> Constraints:
    """HAMi's keys and the model keys of nvidia-gpu-scheduler."""
    annotations = pod.annotations
    card_policy, numa, idle = _hami_card_policy(pod)
    models = [rule for key in MODEL_KEYS for rule in rules(annotations, key, Match.NAME)]
    return Constraints(
        models=(*models, *rules(annotations, "nvidia.com/use-gputype", Match.SUBSTRING)),
        not_models=rules(annotations, "nvidia.com/nouse-gputype", Match.SUBSTRING),
        uuids=frozenset(listed(annotations, "nvidia.com/use-gpuuuid")),
        not_uuids=frozenset(listed(annotations, "nvidia.com/nouse-gpuuuid")),
        modes=_modes(pod),
        numa=Strength.REQUIRE if flag(annotations, "nvidia.com/numa-bind") else numa,
        idle=idle,
        node_policy=one_of(annotations, "hami.io/node-scheduler-policy", {"binpack": "binpack", "spread": "spread"}),
        card_policy=card_policy,
    )


def _hami_card_policy(pod: Pod) -> tuple[str | None, Strength, bool]:
    """HAMi's chain, e.g. `mutex,binpack`: its first policy for cards, and whether it requests NUMA or idle cards."""
    key, known = "hami.io/gpu-scheduler-policy", {"binpack", "spread", "topology-aware", "mutex", "numa"}
    chain = [name.lower() for name in listed(pod.annotations, key)]
    unknown = [name for name in chain if name not in known]
    if unknown:
        raise UnreadableValue(
            RequestError.UNKNOWN_POLICY,
            f"annotation `{key}`: {quoted(unknown[0])} is not a known policy; write one or more of "
            f"{', '.join(sorted(known))}, separated by commas",
        )
    policies = [name.removesuffix("-aware") for name in chain if name in {"binpack", "spread", "topology-aware"}]
    return (
        policies[0] if policies else None,
        Strength.PREFER if "numa" in chain else Strength.NO,
        "mutex" in chain,
    )


def _modes(pod: Pod) -> frozenset[str]:
    key = "nvidia.com/vgpu-mode"
    modes = frozenset(mode.lower() for mode in listed(pod.annotations, key))
    if modes - SHARING_MODES:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{key}`: {quoted(pod.annotations[key])} is not a known mode; write one or more of "
            f"{', '.join(sorted(SHARING_MODES))}",
        )
    return modes


def merge(first: Constraints, second: Constraints) -> Constraints:
    """Both apply; where they exclude each other, `second` wins."""
    return Constraints(
        models=first.models + second.models,
        not_models=first.not_models + second.not_models,
        uuids=_both(first.uuids, second.uuids),
        not_uuids=first.not_uuids | second.not_uuids,
        modes=_both(first.modes, second.modes),
        numa=second.numa if second.numa is not Strength.NO else first.numa,
        links=second.links if second.links is not Strength.NO else first.links,
        idle=first.idle or second.idle,
        node_policy=second.node_policy or first.node_policy,
        card_policy=second.card_policy or first.card_policy,
    )


def _both(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """Empty means anything. Two lists without a common entry give a name that no card has."""
    if not first or not second:
        return first or second
    return first & second or frozenset({"(none: two lists have nothing in common)"})
