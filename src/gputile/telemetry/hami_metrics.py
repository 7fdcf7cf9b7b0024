"""HAMi's names for the same figures, so that dashboards made for HAMi go on working.

Names, labels and units are HAMi's: every series has the label `zone`, and what it calls a ratio of cores is percent.
Left out is what we cannot say truly: its build, its MIG instances, and what only its own library inside the container
knows (the kinds of memory, the last kernel).
"""

from gputile.telemetry.exposition import MetricFamily

ZONE = "vGPU"

GPU = ("zone", "node", "device_uuid", "device_index", "device_type")
WITH_CORES = ("zone", "node", "device_uuid", "device_index", "device_cores", "device_type")
RATIO = ("zone", "node", "device_uuid", "device_index")
OVERVIEW = ("zone", "node", "device_uuid", "device_index", "device_cores", "device_memory_limit", "device_type")
HELD = ("zone", "namespace", "node", "pod", "container_index", "device_uuid")
USED = ("zone", "namespace", "pod", "container", "vdevice_index", "device_uuid")

GPU_MEMORY_LIMIT = MetricFamily("hami_gpu_memory_limit_bytes", "Memory of a card.", GPU)
GPU_CORE_LIMIT = MetricFamily("hami_gpu_core_limit_ratio", "Cores of a card, in percent.", GPU)
GPU_MEMORY_ALLOCATED = MetricFamily("hami_gpu_memory_allocated_bytes", "Memory that pods hold of a card.", WITH_CORES)
GPU_CORE_ALLOCATED = MetricFamily("hami_gpu_core_allocated_ratio", "Cores that pods hold of a card, in percent.", GPU)
GPU_SHARED = MetricFamily("hami_gpu_shared_count", "Containers that share a card.", GPU)
NODE_OVERVIEW = MetricFamily("hami_node_gpu_overview", "Memory in bytes that pods hold of a card.", OVERVIEW)
NODE_MEMORY_RATIO = MetricFamily("hami_node_gpu_memory_allocated_ratio", "Share of its memory that pods hold.", RATIO)
VGPU_MEMORY_ALLOCATED = MetricFamily(
    "hami_vgpu_memory_allocated_bytes", "Memory that a container holds of a card.", HELD
)
VGPU_CORE_ALLOCATED = MetricFamily("hami_vgpu_core_allocated_ratio", "Cores that a container holds, in percent.", HELD)

HAMI_FAMILIES = (
    GPU_MEMORY_LIMIT,
    GPU_CORE_LIMIT,
    GPU_MEMORY_ALLOCATED,
    GPU_CORE_ALLOCATED,
    GPU_SHARED,
    NODE_OVERVIEW,
    NODE_MEMORY_RATIO,
    VGPU_MEMORY_ALLOCATED,
    VGPU_CORE_ALLOCATED,
)

VGPU_MEMORY_USED = MetricFamily("hami_vgpu_memory_used_bytes", "Memory that a container uses of a card.", USED)
VGPU_MEMORY_LIMIT = MetricFamily("hami_vgpu_memory_limit_bytes", "Memory that it was granted.", USED)
CONTAINER_MEMORY = MetricFamily("hami_container_device_memory_bytes", "Memory that a container uses of a card.", USED)
CONTAINER_UTILIZATION = MetricFamily(
    "hami_container_device_utilization_ratio", "How busy a container keeps a card, in percent.", USED
)

HAMI_AGENT_FAMILIES = (VGPU_MEMORY_USED, VGPU_MEMORY_LIMIT, CONTAINER_MEMORY, CONTAINER_UTILIZATION)


def device_type(model: str) -> str:
    """As HAMi calls a card of NVIDIA's."""
    return model if model.startswith("NVIDIA-") else f"NVIDIA-{model}"
