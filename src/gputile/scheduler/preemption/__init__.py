"""Preemption: when to preempt, which pods to evict, and the nomination that keeps the capacity."""
