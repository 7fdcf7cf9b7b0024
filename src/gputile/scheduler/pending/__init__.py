"""Pods that fit on no node: Events that say why, and a nudge when they would fit."""
