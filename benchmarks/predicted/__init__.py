"""Programs whose time under ``hybridmem run`` is held against its prediction."""
