"""Outlines of models that are not fused, made from their proofs, and stored beside the proofs."""

from hf_paged.models.derivation.deriving import derive, derived, why_rows_mix

__all__ = ["derive", "derived", "why_rows_mix"]
