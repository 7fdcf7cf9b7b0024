"""All GPUs of the cluster as arrays: which nodes fit, which are best, and why the others do not fit."""
