"""A record of steps and requests over time, for a viewer of traces."""
