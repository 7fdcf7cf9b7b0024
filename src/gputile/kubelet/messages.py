"""The messages of the kubelet's device-plugin API (v1beta1) and podresources API (v1), and a few of the CRI (v1).

Fields stand in the order of their public numbers; see `protobuf`.
"""

from msgspec import field

from gputile.kubelet.protobuf import Message

VERSION = "v1beta1"
REGISTER = "/v1beta1.Registration/Register"
PLUGIN = "v1beta1.DevicePlugin"
RUNTIME_STATUS = "/runtime.v1.RuntimeService/Status"
CONTAINERS = "/runtime.v1.RuntimeService/ListContainers"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


class Empty(Message):
    """A message without fields."""


# ---- device plugins -------------------------------------------------------------------------------------------------


class DevicePluginOptions(Message):
    pre_start_required: bool = False
    get_preferred_allocation_available: bool = False


class RegisterRequest(Message):
    version: str = VERSION
    endpoint: str = ""  # the name of our socket, in the kubelet's own folder
    resource_name: str = ""
    options: DevicePluginOptions = field(default_factory=DevicePluginOptions)


class NUMANode(Message):
    id: int = 0


class TopologyInfo(Message):
    nodes: list[NUMANode] = field(default_factory=list)


class AdvertisedDevice(Message):
    id: str = ""
    health: str = ""
    topology: TopologyInfo = field(default_factory=TopologyInfo)


class ListAndWatchResponse(Message):
    devices: list[AdvertisedDevice] = field(default_factory=list)


class ContainerPreferredAllocationRequest(Message):
    available: list[str] = field(default_factory=list)
    must_include: list[str] = field(default_factory=list)
    size: int = 0


class PreferredAllocationRequest(Message):
    containers: list[ContainerPreferredAllocationRequest] = field(default_factory=list)


class DeviceIds(Message):
    ids: list[str] = field(default_factory=list)


class PreferredAllocationResponse(Message):
    containers: list[DeviceIds] = field(default_factory=list)


class AllocateRequest(Message):
    containers: list[DeviceIds] = field(default_factory=list)


class Mount(Message):
    container_path: str = ""
    host_path: str = ""
    read_only: bool = False


class DeviceSpec(Message):
    container_path: str = ""
    host_path: str = ""
    permissions: str = ""


class CDIDevice(Message):
    name: str = ""


class ContainerAllocateResponse(Message):
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[Mount] = field(default_factory=list)
    devices: list[DeviceSpec] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[CDIDevice] = field(default_factory=list)


class AllocateResponse(Message):
    containers: list[ContainerAllocateResponse] = field(default_factory=list)


# ---- the runtime ----------------------------------------------------------------------------------------------------


class StatusRequest(Message):
    verbose: bool = False


class StatusResponse(Message):
    status: Empty = field(default_factory=Empty)
    info: dict[str, str] = field(default_factory=dict)


class ListedContainer(Message):
    id: str = ""
    sandbox: str = ""
    metadata: Empty = field(default_factory=Empty)
    image: Empty = field(default_factory=Empty)
    image_ref: str = ""
    state: int = 0
    created_at: int = 0
    labels: dict[str, str] = field(default_factory=dict)


class ListContainersResponse(Message):
    containers: list[ListedContainer] = field(default_factory=list)
