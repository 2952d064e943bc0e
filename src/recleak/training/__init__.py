"""Batched local training, optimizers, aggregation, executors."""
