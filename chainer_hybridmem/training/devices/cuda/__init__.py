"""CuPy's memory and streams."""
