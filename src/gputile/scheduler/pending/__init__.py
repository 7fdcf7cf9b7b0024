"""Pods that fit on no node: Events that say why, and a nudge (requeue) when they fit."""
