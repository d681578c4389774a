"""Useful beside training; nothing else needs them.

* ``inference_recorder``, ``inference_session``: forward passes without backward
* ``memory_series``, ``memory_pools``, ``memory_profile``: a memory pool over time
* ``memory_tests``: the plugin of pytest
"""
