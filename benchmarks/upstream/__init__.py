"""Chainer's own tests with every feature map leaving."""
