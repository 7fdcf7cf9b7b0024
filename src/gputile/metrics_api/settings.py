"""Settings of the aggregated metrics API."""

import msgspec


class MetricsApiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings under `metrics_api`."""

    listen: str = ""
    """Address and port of the aggregated API, such as 0.0.0.0:12346. Empty: it is not served. It has a port of its own,
    because its clients are authenticated by the front proxy. Needs deploy/metrics-api.yaml."""

    service: str = "gputile-metrics"
    """The Service that the APIServices name; the serving certificate is issued for its DNS name."""

    namespace: str = "kube-system"
    """Namespace of that Service and of the Secret."""

    certificate: str = ""
    """File with the serving certificate (PEM). Empty: gputile issues one, keeps it in the Secret, renews it and updates
    the caBundle of the APIServices."""

    key: str = ""
    """File with the private key of the certificate (PEM)."""

    secret: str = "gputile-metrics-tls"
    """The Secret with the certificate that gputile issues. deploy/metrics-api.yaml creates it, empty."""

    days: int = 365
    """Lifetime of an issued certificate in days. It is renewed when a third of it is left."""

    history: int = 20_000
    """Changes of each kind that are kept: how far back a watch can resume, and how far a slow watch may fall behind."""

    authorization_ttl: float = 10.0
    """Seconds for which a SubjectAccessReview of the API server is cached."""
