"""Checks that a model's code, hooks and tensors are the ones that the native path stands in for."""
