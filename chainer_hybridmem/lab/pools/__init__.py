"""Models of memory pools, and an iteration replayed in them."""
