"""From logits to tokens: settings on the device, their kernels and their references."""
