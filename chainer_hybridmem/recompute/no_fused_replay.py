"""The error of functions and arrays that have no fused replay."""


class NoFusedReplayError(Exception):
    """These functions have no fused replay for these arrays."""
