"""Forward functions made again for less than their forward costs."""
