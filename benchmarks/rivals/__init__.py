"""Other systems and published figures beside the planners."""
