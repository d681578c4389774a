"""What a session is given: options, device, thread, links and instruments."""
