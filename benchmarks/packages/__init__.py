"""Packages that other people have made for Chainer, unmodified, inside of limits."""
