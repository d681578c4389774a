"""NumPy's memory."""
