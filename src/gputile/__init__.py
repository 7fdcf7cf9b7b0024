"""gputile shares NVIDIA GPUs on Kubernetes: whole GPUs, or tiles of one."""

__version__ = "0.1.0"
