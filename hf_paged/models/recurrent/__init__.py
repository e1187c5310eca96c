"""Recurrent states of layers, as transformers' caches hand them out."""
