"""Runs step plans on the device."""
