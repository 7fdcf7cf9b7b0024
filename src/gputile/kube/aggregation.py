"""The calls of an aggregated API to the API server: front-proxy CA, access reviews, and its own serving certificate.

It watches one ConfigMap and one Secret, writes one Secret and some APIServices, and creates SubjectAccessReviews. It
must access each object by name, so that RBAC can be limited to these names.
"""

import base64
import binascii
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

import msgspec

from gputile.kube.api import ApiRejected, Json, OutcomeUnknown, WatchUpdate
from gputile.kube.client import MERGE, Client, path_of
from gputile.kube.watch import UNREADABLE, follow
from gputile.model.decode_errors import decode_problem

T = TypeVar("T")
NAMESPACE, FRONT_PROXY = "kube-system", "extension-apiserver-authentication"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class SecretMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The `metadata` of a Secret or ConfigMap, as far as this module reads it."""

    name: str = ""
    resource_version: str = ""


class FrontProxyConfigMap(msgspec.Struct, frozen=True):
    """The ConfigMap with the CA and the allowed names of the front proxy."""

    metadata: SecretMetadata = SecretMetadata()
    data: dict[str, str] | None = None


class Secret(msgspec.Struct, frozen=True):
    """A v1 Secret; its values are base64."""

    metadata: SecretMetadata = SecretMetadata()
    data: dict[str, str] | None = None

    def get(self, key: str) -> bytes:
        """The decoded value; b"" if the key is missing or not base64."""
        try:
            return base64.b64decode((self.data or {}).get(key, ""), validate=True)
        except binascii.Error:
            return b""


class ReviewStatus(msgspec.Struct, frozen=True):
    """The `status` of a SubjectAccessReview."""

    allowed: bool = False
    reason: str | None = None


class ReviewResponse(msgspec.Struct, frozen=True):
    """A SubjectAccessReview as the API server returns it."""

    status: ReviewStatus = ReviewStatus()


class ServiceSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The `spec` of an APIService, as far as this module reads it."""

    ca_bundle: str | None = None


class ApiService(msgspec.Struct, frozen=True):
    """An apiregistration.k8s.io/v1 APIService."""

    spec: ServiceSpec = ServiceSpec()


class Aggregation:
    """The API server, as an aggregated API server uses it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def follow_front_proxy(self) -> AsyncGenerator[WatchUpdate[FrontProxyConfigMap], None]:
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
        return follow(
            self._client.feed(path, "ConfigMap", FrontProxyConfigMap, fieldSelector=f"metadata.name={FRONT_PROXY}")
        )

    def follow_secret(self, namespace: str, name: str) -> AsyncGenerator[WatchUpdate[Secret], None]:
        path = f"/api/v1/namespaces{path_of(namespace, 'secrets')}"
        return follow(self._client.feed(path, "Secret", Secret, fieldSelector=f"metadata.name={name}"))

    async def write_secret(self, namespace: str, name: str, version: str, data: Mapping[str, bytes]) -> Secret:
        """Write if the Secret is unchanged since `version` (else `ApiRejected` 409); return the new Secret."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        body: Json = {"metadata": {"resourceVersion": version}, "data": encoded}
        path = f"/api/v1/namespaces{path_of(namespace, 'secrets', name)}"
        return _read(await self._client.request("PATCH", path, body=body, content_type=MERGE), Secret)

    async def ca_bundle(self, service: str) -> bytes | None:
        """The CA bundle of an APIService; None if there is no such APIService."""
        try:
            api_service = _read(await self._client.request("GET", _api_service(service)), ApiService)
        except ApiRejected as error:
            if error.status == 404:
                return None
            raise
        try:
            return base64.b64decode(api_service.spec.ca_bundle or "", validate=True)
        except binascii.Error:
            return b""

    async def set_ca_bundle(self, service: str, bundle: bytes) -> None:
        spec = {"caBundle": base64.b64encode(bundle).decode(), "insecureSkipTLSVerify": None}
        await self._client.request("PATCH", _api_service(service), body={"spec": spec}, content_type=MERGE)

    async def review(self, spec: Json) -> tuple[bool, str]:
        """Create a SubjectAccessReview; return whether the access is allowed, and the API server's reason."""
        body: Json = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        status = _read(await self._client.request("POST", REVIEWS, body=body), ReviewResponse).status
        return status.allowed, status.reason or ""


def _api_service(name: str) -> str:
    return f"/apis/apiregistration.k8s.io/v1/apiservices{path_of(name)}"


def _read(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise OutcomeUnknown(f"the API server's response cannot be decoded: {decode_problem(error)}") from error
