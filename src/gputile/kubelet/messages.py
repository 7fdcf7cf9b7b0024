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


class Nothing(Message):
    """A message without fields."""


# ---- device plugins -------------------------------------------------------------------------------------------------


class Options(Message):
    pre_start_required: bool = False
    get_preferred_allocation_available: bool = False


class Registration(Message):
    version: str = VERSION
    endpoint: str = ""  # the name of our socket, in the kubelet's own folder
    resource_name: str = ""
    options: Options = field(default_factory=Options)


class NumaNode(Message):
    id: int = 0


class Topology(Message):
    nodes: list[NumaNode] = field(default_factory=list)


class DeviceSaid(Message):
    id: str = ""
    health: str = ""
    topology: Topology = field(default_factory=Topology)


class Devices(Message):
    devices: list[DeviceSaid] = field(default_factory=list)


class PreferenceAsked(Message):
    available: list[str] = field(default_factory=list)
    must_include: list[str] = field(default_factory=list)
    size: int = 0


class PreferencesAsked(Message):
    containers: list[PreferenceAsked] = field(default_factory=list)


class Ids(Message):
    ids: list[str] = field(default_factory=list)


class Preferences(Message):
    containers: list[Ids] = field(default_factory=list)


class AllocationsAsked(Message):
    containers: list[Ids] = field(default_factory=list)


class Mount(Message):
    container_path: str = ""
    host_path: str = ""
    read_only: bool = False


class DeviceNode(Message):
    container_path: str = ""
    host_path: str = ""
    permissions: str = ""


class CdiDevice(Message):
    name: str = ""


class Allocation(Message):
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[Mount] = field(default_factory=list)
    devices: list[DeviceNode] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[CdiDevice] = field(default_factory=list)


class Allocations(Message):
    containers: list[Allocation] = field(default_factory=list)


# ---- the runtime ----------------------------------------------------------------------------------------------------


class StatusAsked(Message):
    verbose: bool = False


class StatusSaid(Message):
    status: Nothing = field(default_factory=Nothing)
    info: dict[str, str] = field(default_factory=dict)


class ContainerSaid(Message):
    id: str = ""
    sandbox: str = ""
    metadata: Nothing = field(default_factory=Nothing)
    image: Nothing = field(default_factory=Nothing)
    image_ref: str = ""
    state: int = 0
    created_at: int = 0
    labels: dict[str, str] = field(default_factory=dict)


class ContainersSaid(Message):
    containers: list[ContainerSaid] = field(default_factory=list)
