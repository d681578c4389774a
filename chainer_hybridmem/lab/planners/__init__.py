"""Planners of other papers: one file per system."""
