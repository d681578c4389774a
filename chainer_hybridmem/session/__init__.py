"""What trains a model within its limit: the session and what it learns and decides."""
