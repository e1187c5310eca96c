"""Checks of a clone, each of which raises `Refused` with what differs."""
