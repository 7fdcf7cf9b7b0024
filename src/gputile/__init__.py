"""gputile hands out GPUs on Kubernetes: whole cards, or tiles of a card."""

__version__ = "0.1.0"
