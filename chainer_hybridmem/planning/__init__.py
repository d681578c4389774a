"""Profiles in, plans out: no Chainer, no device.

* ``records``: what is written down, and its checks: profiles, plans, timelines
* ``simulation``: simulates a plan on its profile
* ``search``: what planners are made of: candidates, the bound, local search, repairs
* ``planners``: profile and limit in, plan out
* ``layouts``: where in memory each array lies
"""
