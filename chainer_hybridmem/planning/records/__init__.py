"""What is written down: profiles, plans and timelines, and how they are checked."""
