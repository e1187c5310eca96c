"""All layers of a decoder for a step of a few rows in one launch."""
