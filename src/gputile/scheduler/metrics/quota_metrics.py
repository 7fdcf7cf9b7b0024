"""Metrics of quotas: usage and limit of every namespace, one series for each limit that is set."""

from gputile.model.units import ALL
from gputile.quota.arithmetic import KINDS, total
from gputile.quota.usage import QuotaUsage
from gputile.telemetry import exposition as to
from gputile.telemetry.exposition import MIB, ExpositionPage, labelled

SCALE = {"cards": 1 / ALL, "memory": MIB, "cores": 1 / ALL}
"""To the units of the metrics: cards, bytes, and cores as shares of a card."""


def add_quotas(page: ExpositionPage, quota_usage: QuotaUsage) -> None:
    for namespace in quota_usage.namespaces():
        quota = quota_usage.quota(namespace)
        for limit in quota.limits if quota else ():
            used = total(quota_usage.held(namespace), limit)
            for kind in KINDS:
                allowed = getattr(limit, kind)
                if allowed is not None:
                    labels = labelled(to.QUOTA, namespace, limit.model, kind)
                    page.add(to.QUOTA_USED, labels, getattr(used, kind) * SCALE[kind])
                    page.add(to.QUOTA_LIMIT, labels, allowed * SCALE[kind])
