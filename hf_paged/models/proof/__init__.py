"""Proof that a decoder class runs packed and paged with stock's numbers, from small random clones on the CPU."""

from hf_paged.models.proof.prove import prove
from hf_paged.models.proof.verdict import Verdict

__all__ = ["Verdict", "prove"]
