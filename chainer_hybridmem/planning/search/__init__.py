"""What planners are made of: judging candidates, bounds, searches, repairs of plans."""
