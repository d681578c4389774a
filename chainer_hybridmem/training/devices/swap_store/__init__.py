"""Where swapped feature maps are: RAM up to a limit, then a file."""
