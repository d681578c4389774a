"""Memory tests: a plugin of pytest, for programs that train with Chainer.

pytest imports :mod:`.plugin` wherever this package is installed. So what measures and
estimates is imported where a test asks for it.
"""
