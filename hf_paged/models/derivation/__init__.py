"""Outlines of models that are not fused, made from their proofs, and stored beside the proofs."""

from hf_paged.models.derivation.deriving import derive, derived, rows_in

__all__ = ["derive", "derived", "rows_in"]
