"""The messages of the kubelet's device-plugin API (v1beta1), and a few of the CRI (v1).

Fields are declared in the order of their protobuf field numbers; see `protobuf`.
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
    """Which optional calls the plugin implements."""

    pre_start_required: bool = False
    get_preferred_allocation_available: bool = False


class RegisterRequest(Message):
    """How a plugin registers a resource with the kubelet."""

    version: str = VERSION
    endpoint: str = ""  # file name of the plugin's socket, in the kubelet's plugin folder
    resource_name: str = ""
    options: DevicePluginOptions = field(default_factory=DevicePluginOptions)


class NUMANode(Message):
    """One NUMA node, by its number."""

    id: int = 0


class TopologyInfo(Message):
    """The NUMA nodes that are close to a device."""

    nodes: list[NUMANode] = field(default_factory=list)


class AdvertisedDevice(Message):
    """A `Device` of ListAndWatch, with its health."""

    id: str = ""
    health: str = ""
    topology: TopologyInfo = field(default_factory=TopologyInfo)


class ListAndWatchResponse(Message):
    """All devices of a resource; sent again whenever they change."""

    devices: list[AdvertisedDevice] = field(default_factory=list)


class ContainerPreferredAllocationRequest(Message):
    """Which devices are available for a container, and how many it gets."""

    available: list[str] = field(default_factory=list)
    must_include: list[str] = field(default_factory=list)
    size: int = 0


class PreferredAllocationRequest(Message):
    """The request of GetPreferredAllocation, one part per container."""

    containers: list[ContainerPreferredAllocationRequest] = field(default_factory=list)


class DeviceIds(Message):
    """A list of device IDs; several messages of the API have this form (PreStartContainerRequest, ...)."""

    ids: list[str] = field(default_factory=list)


class PreferredAllocationResponse(Message):
    """The preferred device IDs of each container."""

    containers: list[DeviceIds] = field(default_factory=list)


class AllocateRequest(Message):
    """The device IDs that the kubelet allocates to each container."""

    containers: list[DeviceIds] = field(default_factory=list)


class Mount(Message):
    """A path of the host to mount into the container."""

    container_path: str = ""
    host_path: str = ""
    read_only: bool = False


class DeviceSpec(Message):
    """A device node of the host to add to the container."""

    container_path: str = ""
    host_path: str = ""
    permissions: str = ""


class CDIDevice(Message):
    """A CDI device to add to the container, by its full name."""

    name: str = ""


class ContainerAllocateResponse(Message):
    """What the runtime adds to one container: environment, mounts, device nodes, CDI devices."""

    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[Mount] = field(default_factory=list)
    devices: list[DeviceSpec] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[CDIDevice] = field(default_factory=list)


class AllocateResponse(Message):
    """The response of Allocate, one part per container."""

    containers: list[ContainerAllocateResponse] = field(default_factory=list)


# ---- the container runtime ------------------------------------------------------------------------------------------


class StatusRequest(Message):
    """The CRI's request for the status of the runtime; `verbose` adds its configuration."""

    verbose: bool = False


class StatusResponse(Message):
    """The runtime's status; `info` has the configuration as JSON."""

    status: Empty = field(default_factory=Empty)
    info: dict[str, str] = field(default_factory=dict)


class ListedContainer(Message):
    """A `Container` of ListContainers."""

    id: str = ""
    sandbox: str = ""
    metadata: Empty = field(default_factory=Empty)
    image: Empty = field(default_factory=Empty)
    image_ref: str = ""
    state: int = 0
    created_at: int = 0
    labels: dict[str, str] = field(default_factory=dict)


class ListContainersResponse(Message):
    """All containers that the runtime has."""

    containers: list[ListedContainer] = field(default_factory=list)
