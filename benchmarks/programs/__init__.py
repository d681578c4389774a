"""Chainer's example programs under sessions."""
