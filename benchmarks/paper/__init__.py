"""Figures of the paper by Ito et al., and how planning scales."""
