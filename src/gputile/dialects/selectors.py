"""Annotations by which pods choose cards, where more than one family honours them.

HAMi's and NVIDIA's keys are read in every dialect on `nvidia.com/*`; ours are read in all dialects, so that a pod can
name a model or a policy without changing its resources.
"""

from gputile.dialects.kube_objects import Pod, Text, UnreadableValue, flag, listed, one_of, quoted
from gputile.model.refusals import RequestError
from gputile.model.requests import Constraints, Match, ModelRule, Strength

POLICIES = ("binpack", "spread", "random", "topology", "fragmentation", "tiling")
POLICY = {name: name for name in POLICIES}
WISH = {"prefer": Strength.PREFER, "require": Strength.REQUIRE, "no": Strength.NO}

MODEL_KEYS = ("nvidia.com/gpu.model", "nvidia-gpu-scheduler/gpu.model")
SHARING_MODES = frozenset({"hami-core", "mig", "mps"})


def rules(said: Text, key: str, match: Match) -> tuple[ModelRule, ...]:
    """A comma list as a rule; an empty list is no rule."""
    found = listed(said, key)
    return (ModelRule(found, match),) if found else ()


def by_gputile_keys(pod: Pod) -> Constraints:
    """Our own annotations, `gputile.io/...`."""
    said = pod.annotations
    policy = one_of(said, "gputile.io/policy", POLICY)
    return Constraints(
        models=rules(said, "gputile.io/model", Match.NAME),
        not_models=rules(said, "gputile.io/not-model", Match.NAME),
        uuids=frozenset(listed(said, "gputile.io/uuid")),
        not_uuids=frozenset(listed(said, "gputile.io/not-uuid")),
        numa=one_of(said, "gputile.io/numa", WISH) or Strength.NO,
        links=one_of(said, "gputile.io/links", WISH) or Strength.NO,
        node_policy=policy,
        card_policy=policy,
    )


def by_nvidia_keys(pod: Pod) -> Constraints:
    """HAMi's keys and the model keys of nvidia-gpu-scheduler."""
    said = pod.annotations
    card_policy, numa, idle = _hami_card_policy(pod)
    models = [rule for key in MODEL_KEYS for rule in rules(said, key, Match.NAME)]
    return Constraints(
        models=(*models, *rules(said, "nvidia.com/use-gputype", Match.SUBSTRING)),
        not_models=rules(said, "nvidia.com/nouse-gputype", Match.SUBSTRING),
        uuids=frozenset(listed(said, "nvidia.com/use-gpuuuid")),
        not_uuids=frozenset(listed(said, "nvidia.com/nouse-gpuuuid")),
        modes=_modes(pod),
        numa=Strength.REQUIRE if flag(said, "nvidia.com/numa-bind") else numa,
        idle=idle,
        node_policy=one_of(said, "hami.io/node-scheduler-policy", {"binpack": "binpack", "spread": "spread"}),
        card_policy=card_policy,
    )


def _hami_card_policy(pod: Pod) -> tuple[str | None, Strength, bool]:
    """HAMi's chain, e.g. `mutex,binpack`: the first order of cards in it, whether NUMA and idle cards are wanted."""
    key, known = "hami.io/gpu-scheduler-policy", {"binpack", "spread", "topology-aware", "mutex", "numa"}
    chain = [word.lower() for word in listed(pod.annotations, key)]
    unknown = [word for word in chain if word not in known]
    if unknown:
        raise UnreadableValue(
            RequestError.UNKNOWN_POLICY,
            f"annotation `{key}` names {quoted(unknown[0])}; write one or more of {', '.join(sorted(known))}, "
            "joined by commas",
        )
    orders = [word.removesuffix("-aware") for word in chain if word in {"binpack", "spread", "topology-aware"}]
    return (
        orders[0] if orders else None,
        Strength.PREFER if "numa" in chain else Strength.NO,
        "mutex" in chain,
    )


def _modes(pod: Pod) -> frozenset[str]:
    key = "nvidia.com/vgpu-mode"
    wanted = frozenset(word.lower() for word in listed(pod.annotations, key))
    if wanted - SHARING_MODES:
        raise UnreadableValue(
            RequestError.BAD_ANNOTATION,
            f"annotation `{key}` is {quoted(pod.annotations[key])}; write one or more of "
            f"{', '.join(sorted(SHARING_MODES))}",
        )
    return wanted


def merge(first: Constraints, second: Constraints) -> Constraints:
    """Both apply; where only one can, `second` wins."""
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


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Empty means anything. Two lists without a common entry leave a name that no card has."""
    if not one or not other:
        return one or other
    return one & other or frozenset({"(none: two lists have nothing in common)"})
