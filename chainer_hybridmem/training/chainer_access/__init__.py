"""Reads and writes Chainer's private fields; no other room does."""
