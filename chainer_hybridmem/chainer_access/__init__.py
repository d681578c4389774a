"""What touches Chainer's private fields; no other room does."""
