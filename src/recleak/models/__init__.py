"""Recommenders: baselines that count, and one module per family that trains."""
