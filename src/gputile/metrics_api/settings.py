"""Settings of the aggregated metrics API."""

import msgspec


class MetricsApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: str = ""
    """Address and port of the aggregated API, such as 0.0.0.0:12346. Empty: it is not served. A port of its own, for
    its callers prove themselves in another way than kube-scheduler does. Needs deploy/metrics-api.yaml."""

    service: str = "gputile-metrics"
    """The Service that the APIServices name; the API server expects our certificate to be made out to it."""

    namespace: str = "kube-system"
    """Where that Service and the Secret are."""

    certificate: str = ""
    """File with our certificate (PEM). Empty: we make one, keep it in the Secret, renew it and tell the APIServices."""

    key: str = ""
    """File with its key."""

    secret: str = "gputile-metrics-tls"
    """The Secret that holds the certificate that we make. deploy/metrics-api.yaml makes it, empty."""

    days: int = 365
    """How long a certificate that we make lasts. It is renewed when a third of that is left."""

    history: int = 20_000
    """Changes of each kind that a watch may resume from, and that a slow reader may be behind."""

    authorization_ttl: float = 10.0
    """Seconds for which an answer of the API server about who may read what is used again."""
