"""What /metrics shows of the cluster."""
