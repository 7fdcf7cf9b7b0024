"""What an aggregated API needs of the API server: whom it believes, who may do what, and its own certificate.

Room:  one ConfigMap and one Secret followed, one Secret and some APIServices written, access reviewed. Each by its
       name, so that the rights can be as narrow.
Door:  `Aggregation(client)`.
"""

import base64
import binascii
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

import msgspec

from gputile.kube.api import ApiRejected, Json, OutcomeUnknown, WatchUpdate
from gputile.kube.client import MERGE, Client, path_of
from gputile.kube.watch import UNREADABLE, follow

T = TypeVar("T")
HOME, FRONT_PROXY = "kube-system", "extension-apiserver-authentication"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class SecretMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class FrontProxyConfigMap(msgspec.Struct, frozen=True):
    metadata: SecretMetadata = SecretMetadata()
    data: dict[str, str] | None = None


class Secret(msgspec.Struct, frozen=True):
    metadata: SecretMetadata = SecretMetadata()
    data: dict[str, str] | None = None

    def get(self, key: str) -> bytes:
        """b"" where there is nothing that can be read."""
        try:
            return base64.b64decode((self.data or {}).get(key, ""), validate=True)
        except binascii.Error:
            return b""


class ReviewStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    reason: str | None = None


class ReviewResponse(msgspec.Struct, frozen=True):
    status: ReviewStatus = ReviewStatus()


class ServiceSpec(msgspec.Struct, frozen=True, rename="camel"):
    ca_bundle: str | None = None


class ApiService(msgspec.Struct, frozen=True):
    spec: ServiceSpec = ServiceSpec()


class Aggregation:
    """See the module's text."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def follow_front_proxy(self) -> AsyncGenerator[WatchUpdate[FrontProxyConfigMap], None]:
        path = f"/api/v1/namespaces/{HOME}/configmaps"
        return follow(
            self._client.feed(path, "ConfigMap", FrontProxyConfigMap, fieldSelector=f"metadata.name={FRONT_PROXY}")
        )

    def follow_secret(self, namespace: str, name: str) -> AsyncGenerator[WatchUpdate[Secret], None]:
        path = f"/api/v1/namespaces{path_of(namespace, 'secrets')}"
        return follow(self._client.feed(path, "Secret", Secret, fieldSelector=f"metadata.name={name}"))

    async def write_secret(self, namespace: str, name: str, version: str, data: Mapping[str, bytes]) -> Secret:
        """If nobody has changed it since `version`; what is there now."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        body: Json = {"metadata": {"resourceVersion": version}, "data": encoded}
        path = f"/api/v1/namespaces{path_of(namespace, 'secrets', name)}"
        return _read(await self._client.request("PATCH", path, body=body, content_type=MERGE), Secret)

    async def ca_bundle(self, service: str) -> bytes | None:
        """Of an APIService; None where there is no such service."""
        try:
            found = _read(await self._client.request("GET", _api_service(service)), ApiService)
        except ApiRejected as no:
            if no.status == 404:
                return None
            raise
        try:
            return base64.b64decode(found.spec.ca_bundle or "", validate=True)
        except binascii.Error:
            return b""

    async def set_ca_bundle(self, service: str, bundle: bytes) -> None:
        spec = {"caBundle": base64.b64encode(bundle).decode(), "insecureSkipTLSVerify": None}
        await self._client.request("PATCH", _api_service(service), body={"spec": spec}, content_type=MERGE)

    async def review(self, spec: Json) -> tuple[bool, str]:
        """Whether what a SubjectAccessReview asks is allowed, and what the API server says about it."""
        body: Json = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        found = _read(await self._client.request("POST", REVIEWS, body=body), ReviewResponse).status
        return found.allowed, found.reason or ""


def _api_service(name: str) -> str:
    return f"/apis/apiregistration.k8s.io/v1/apiservices{path_of(name)}"


def _read(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as wrong:
        raise OutcomeUnknown(f"the server's answer cannot be read: {wrong}") from wrong
