"""Hooks on a client's life, and the mechanisms that use them."""
