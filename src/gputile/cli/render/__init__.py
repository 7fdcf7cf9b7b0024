"""Rendering of what commands print: tables, bars, explanations, plots."""
