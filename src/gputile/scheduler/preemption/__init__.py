"""Preemption: when to preempt, whom to evict, and the nomination that keeps the capacity."""
