"""Guides kept on disk: what one process has learnt guides the next one."""
