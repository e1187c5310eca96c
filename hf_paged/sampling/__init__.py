"""Sampling of tokens from logits: settings on the device, kernels, and their references in torch."""
