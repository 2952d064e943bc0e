"""Attacks: folds over messages."""
