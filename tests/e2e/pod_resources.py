"""What a kubelet says over its podresources socket, the public API: the witness of what containers hold."""

import asyncio
from pathlib import Path
from typing import TypeAlias

import grpc
from msgspec import field

from gputile.kubelet.device_plugin import PLAIN_SOCKETS
from gputile.kubelet.protobuf import Message, decoder, encode

Devices: TypeAlias = dict[tuple[str, str, str, str], frozenset[str]]
"""By namespace, pod, container and resource."""


class Nothing(Message):
    pass


class ContainerDevices(Message):
    resource_name: str = ""
    ids: list[str] = field(default_factory=list)


class ContainerResources(Message):
    name: str = ""
    devices: list[ContainerDevices] = field(default_factory=list)


class PodResource(Message):
    name: str = ""
    namespace: str = ""
    containers: list[ContainerResources] = field(default_factory=list)


class PodResourceList(Message):
    pods: list[PodResource] = field(default_factory=list)


def pod_resources(socket: Path) -> Devices:
    """What app containers hold; init containers are not in it."""
    found: Devices = {}
    for pod in asyncio.run(_list(socket)).pods:
        for container in pod.containers:
            for device in container.devices:  # one entry per device
                key = (pod.namespace, pod.name, container.name, device.resource_name)
                found[key] = found.get(key, frozenset()) | frozenset(device.ids)
    return found


async def _list(socket: Path) -> PodResourceList:
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=PLAIN_SOCKETS) as channel:
        call = channel.unary_unary(
            "/v1.PodResourcesLister/List", request_serializer=encode, response_deserializer=decoder(PodResourceList)
        )
        said: PodResourceList = await call(Nothing(), timeout=10)
        return said
