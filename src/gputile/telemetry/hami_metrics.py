"""HAMi's names for the same metrics, so that dashboards made for HAMi keep working.

Names, labels and units are HAMi's: every series has the label `zone`, and its "ratio" of cores is in percent. Metrics
that gputile cannot know are left out: HAMi's build, MIG instances, and the values that only HAMi's library inside the
container measures (kinds of memory, last kernel).
"""

from gputile.telemetry.exposition import MetricFamilies

ZONE = "vGPU"

HAMI_FAMILIES = MetricFamilies()
HAMI_AGENT_FAMILIES = MetricFamilies()

GPU = ("zone", "node", "device_uuid", "device_index", "device_type")
WITH_CORES = ("zone", "node", "device_uuid", "device_index", "device_cores", "device_type")
RATIO = ("zone", "node", "device_uuid", "device_index")
OVERVIEW = ("zone", "node", "device_uuid", "device_index", "device_cores", "device_memory_limit", "device_type")
HELD = ("zone", "namespace", "node", "pod", "container_index", "device_uuid")
USED = ("zone", "namespace", "pod", "container", "vdevice_index", "device_uuid")

GPU_MEMORY_LIMIT = HAMI_FAMILIES.gauge("hami_gpu_memory_limit_bytes", "Memory of a GPU.", GPU)
GPU_CORE_LIMIT = HAMI_FAMILIES.gauge("hami_gpu_core_limit_ratio", "Cores of a GPU, in percent.", GPU)
GPU_MEMORY_ALLOCATED = HAMI_FAMILIES.gauge(
    "hami_gpu_memory_allocated_bytes", "Memory of a GPU allocated to pods.", WITH_CORES
)
GPU_CORE_ALLOCATED = HAMI_FAMILIES.gauge(
    "hami_gpu_core_allocated_ratio", "Cores of a GPU allocated to pods, in percent.", GPU
)
GPU_SHARED = HAMI_FAMILIES.gauge("hami_gpu_shared_count", "Containers that share a GPU.", GPU)
NODE_OVERVIEW = HAMI_FAMILIES.gauge("hami_node_gpu_overview", "Memory of a GPU allocated to pods, in bytes.", OVERVIEW)
NODE_MEMORY_RATIO = HAMI_FAMILIES.gauge(
    "hami_node_gpu_memory_allocated_ratio", "Share of a GPU's memory allocated to pods.", RATIO
)
VGPU_MEMORY_ALLOCATED = HAMI_FAMILIES.gauge(
    "hami_vgpu_memory_allocated_bytes", "Memory of a GPU allocated to a container.", HELD
)
VGPU_CORE_ALLOCATED = HAMI_FAMILIES.gauge(
    "hami_vgpu_core_allocated_ratio", "Cores of a GPU allocated to a container, in percent.", HELD
)

VGPU_MEMORY_USED = HAMI_AGENT_FAMILIES.gauge(
    "hami_vgpu_memory_used_bytes", "Memory of a GPU used by a container.", USED
)
VGPU_MEMORY_LIMIT = HAMI_AGENT_FAMILIES.gauge(
    "hami_vgpu_memory_limit_bytes", "Memory of a GPU granted to a container.", USED
)
CONTAINER_MEMORY = HAMI_AGENT_FAMILIES.gauge(
    "hami_container_device_memory_bytes", "Memory of a GPU used by a container.", USED
)
CONTAINER_UTILIZATION = HAMI_AGENT_FAMILIES.gauge(
    "hami_container_device_utilization_ratio", "Utilization of a GPU by a container, in percent.", USED
)


def device_type(model: str) -> str:
    """HAMi's name for a model of NVIDIA."""
    return model if model.startswith("NVIDIA-") else f"NVIDIA-{model}"
