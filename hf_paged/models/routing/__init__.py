"""Routes of tokens through experts: recorded in steps, and replayed in a trainer's forwards."""
