"""Plans and layouts against the best that others have published."""
