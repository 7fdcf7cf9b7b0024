"""Tasks and time slices of the event loop. This package knows neither Kubernetes nor GPUs."""
