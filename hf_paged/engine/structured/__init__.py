"""Structured output: grammars, the processes that compile them, and masks of the tokens that may follow."""
