"""What namespaces hold of their quotas, for Prometheus: a series for each limit that is set."""

from gputile.model.units import ALL
from gputile.quota.arithmetic import KINDS, total
from gputile.quota.usage import QuotaUsage
from gputile.telemetry import exposition as to
from gputile.telemetry.exposition import MIB, ExpositionPage, labelled

SCALE = {"cards": 1 / ALL, "memory": MIB, "cores": 1 / ALL}
"""Cards, bytes, and cores as shares of a card."""


def add_quotas(page: ExpositionPage, quota_usage: QuotaUsage) -> None:
    for namespace in quota_usage.namespaces():
        quota = quota_usage.quota(namespace)
        for limit in quota.limits if quota else ():
            held = total(quota_usage.held(namespace), limit)
            for kind in KINDS:
                allowed = getattr(limit, kind)
                if allowed is not None:
                    labels = labelled(to.QUOTA, namespace, limit.model, kind)
                    page.add(to.QUOTA_USED, labels, getattr(held, kind) * SCALE[kind])
                    page.add(to.QUOTA_LIMIT, labels, allowed * SCALE[kind])
