"""Exactness at scale: drawn networks, plans, limits and copies against plain Chainer.

``layers`` is what networks are drawn from, ``cases`` draws, ``training`` trains with
and without a session, ``hostile`` makes a session's surroundings unfriendly and
repeatable, ``checking`` compares and shrinks, ``__main__`` is the command line.
"""
