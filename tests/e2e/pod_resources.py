"""The kubelet's podresources socket, its public API: the independent source of the devices of containers."""

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
    """An empty request."""


class ContainerDevices(Message):
    """Devices of one resource in a container."""

    resource_name: str = ""
    ids: list[str] = field(default_factory=list)


class ContainerResources(Message):
    """A container and its devices."""

    name: str = ""
    devices: list[ContainerDevices] = field(default_factory=list)


class PodResource(Message):
    """A pod and its containers."""

    name: str = ""
    namespace: str = ""
    containers: list[ContainerResources] = field(default_factory=list)


class PodResourceList(Message):
    """The response of `List`."""

    pods: list[PodResource] = field(default_factory=list)


def pod_resources(socket: Path) -> Devices:
    """The devices of app containers; init containers are not included."""
    devices: Devices = {}
    for pod in asyncio.run(_list(socket)).pods:
        for container in pod.containers:
            for device in container.devices:  # one entry per device
                key = (pod.namespace, pod.name, container.name, device.resource_name)
                devices[key] = devices.get(key, frozenset()) | frozenset(device.ids)
    return devices


async def _list(socket: Path) -> PodResourceList:
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=PLAIN_SOCKETS) as channel:
        call = channel.unary_unary(
            "/v1.PodResourcesLister/List", request_serializer=encode, response_deserializer=decoder(PodResourceList)
        )
        response: PodResourceList = await call(Nothing(), timeout=10)
        return response
