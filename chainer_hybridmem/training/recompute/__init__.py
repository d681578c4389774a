"""Running forward functions again: which may be, how fast, with what effects."""
