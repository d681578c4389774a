"""Benchmarks on an NVIDIA GPU; ``run.sh`` runs them in turn."""
