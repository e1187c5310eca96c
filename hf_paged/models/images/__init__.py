"""Prompts with images: what a model's own code feeds its decoder in place of tokens, recorded and fed to packed steps.
"""
